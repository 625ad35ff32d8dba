"""Scripts of a Megatron-LM checkout."""
