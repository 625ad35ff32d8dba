"""Tables of what the plugin changes in Megatron: start at ``rows``; ``row`` has the
versions.

``megatron-muon doctor`` and ``tests/cores/test_seams.py`` show what a new version
breaks.
"""
