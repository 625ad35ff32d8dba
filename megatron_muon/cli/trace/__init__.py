"""``megatron-muon trace``."""
