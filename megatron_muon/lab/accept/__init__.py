"""``megatron-muon accept``: every check of the package on this node, with a report."""
