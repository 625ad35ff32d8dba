"""``megatron-muon trace``: traces of a run's steps, made, merged and reported."""
