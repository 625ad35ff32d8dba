"""Muon in megatron-core: hooks, routing, wiring; ``seams`` lists what a new Megatron
can break.
"""
