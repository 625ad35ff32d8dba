"""``megatron-muon checkpoint inspect``."""
