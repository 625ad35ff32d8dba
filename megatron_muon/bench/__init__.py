"""``megatron-muon bench``: measurements, and the time model's prices."""
