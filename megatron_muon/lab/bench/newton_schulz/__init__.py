"""``megatron-muon bench newton-schulz``: times and errors of the iterations, beside others'."""
