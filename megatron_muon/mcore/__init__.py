"""The only modules that import Megatron: hooks, routing and wiring into DistributedOptimizer."""
