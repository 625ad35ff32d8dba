"""Muon in Megatron's DistributedOptimizer: its making, its groups, its step."""
