"""Muon's flags: their table, their values, and the settings that they ask for."""
