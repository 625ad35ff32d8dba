"""``megatron-muon bench newton-schulz``."""
