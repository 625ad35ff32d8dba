"""``megatron-muon certify``: a model's optimizer step on a GPU that is not there."""
