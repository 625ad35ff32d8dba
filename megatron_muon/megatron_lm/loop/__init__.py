"""The plugin's part in Megatron-LM's training loop."""
