"""``megatron-muon plan``."""
