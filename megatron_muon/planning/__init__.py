"""Homes, messages and rounds as plain integers, the same on every rank."""
