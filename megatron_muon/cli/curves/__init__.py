"""``megatron-muon curves``: the steps that runs need for the same losses."""
