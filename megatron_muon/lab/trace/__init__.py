"""``megatron-muon trace``: where the time of a step goes, from traces of any run."""
