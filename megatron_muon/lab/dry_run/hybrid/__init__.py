"""Hybrid (Mamba) models and gated delta nets, as ``routes`` and ``plan`` see them."""
