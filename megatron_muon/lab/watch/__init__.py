"""``megatron-muon watch``: the lines that a run logs, as text and as a picture."""
