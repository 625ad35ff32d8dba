"""Logging steps in runs of Megatron-LM's scripts."""
