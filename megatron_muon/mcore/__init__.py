"""Muon in megatron-core: hooks, routing and wiring into DistributedOptimizer."""
