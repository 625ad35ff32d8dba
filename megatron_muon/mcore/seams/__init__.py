"""What the plugin relies on in Megatron, and where."""
