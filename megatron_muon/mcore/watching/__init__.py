"""A run that can be watched: logging steps of Megatron's chain of optimizers."""
