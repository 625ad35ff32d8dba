"""Going on with Muon from checkpoints of AdamW and of other Muons, and with AdamW after Muon."""
