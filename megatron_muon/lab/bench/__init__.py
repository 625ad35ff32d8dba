"""``megatron-muon bench`` and ``compare``: measurements on ranks of their own."""
