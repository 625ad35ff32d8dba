"""``megatron-muon bench step``."""
