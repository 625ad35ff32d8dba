"""``megatron-muon compare``: AdamW and Muon train the same model over several topologies."""
