"""What all of mcore reads of Megatron's optimizer; it imports nothing else of mcore."""
