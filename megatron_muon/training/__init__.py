"""Muon on Megatron-LM's command line."""
