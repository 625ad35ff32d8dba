"""Muon's flags among Megatron's arguments: parsed, read as settings, and written
back.
"""
