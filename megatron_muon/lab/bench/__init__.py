"""``megatron-muon bench`` and ``accept``: measurements on ranks of their own."""
