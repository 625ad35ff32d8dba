"""Hybrid (Mamba) models and gated delta nets."""
