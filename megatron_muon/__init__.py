"""Distributed Muon for Megatron: ``--optimizer muon`` over Megatron's own DistributedOptimizer.

Importing this package pulls in neither Megatron nor torch's distributed runtime; ``install()`` does
the hooking, ``megatron_muon.cpu.enable()`` lets megatron-core run without a GPU.
"""

__version__ = "0.1.0"
