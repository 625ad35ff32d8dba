"""``megatron-muon bench``: measurements on ranks of their own."""
