"""Going on with Muon from AdamW's checkpoints, and the other way round."""
