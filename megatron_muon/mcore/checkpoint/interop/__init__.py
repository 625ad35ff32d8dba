"""Checkpoints of other optimizers."""
