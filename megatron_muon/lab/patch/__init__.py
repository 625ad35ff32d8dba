"""``megatron-muon patch``."""
