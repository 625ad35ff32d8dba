"""Saving, loading, damaging and killing."""
