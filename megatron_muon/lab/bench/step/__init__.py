"""``megatron-muon bench step``: optimizer steps of AdamW and of kinds of Muon."""
