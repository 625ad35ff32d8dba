"""``megatron-muon doctor``: whether Muon would run here, on what, and why not."""
