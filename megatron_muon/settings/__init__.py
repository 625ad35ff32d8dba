"""Muon's settings."""
