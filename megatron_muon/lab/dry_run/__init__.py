"""A run's model and ranks without their memory, from Megatron-LM's flags."""
