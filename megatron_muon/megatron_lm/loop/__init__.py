"""What the plugin does in Megatron-LM's training loop."""
