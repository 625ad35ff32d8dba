"""Muon's state in Megatron's checkpoint formats."""
