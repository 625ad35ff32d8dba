"""What Muon does with Megatron's grad buffers and their buckets."""
