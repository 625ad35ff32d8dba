"""``megatron-muon bench``, ``accept`` and ``compare``: measurements on ranks of their own."""
