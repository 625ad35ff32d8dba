"""``megatron-muon bench price``."""
