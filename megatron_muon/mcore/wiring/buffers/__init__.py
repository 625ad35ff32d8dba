"""What Muon does with Megatron's grad buffers, their buckets and their gathers."""
