"""Runs and plans for a GPU that is not there, and a report of real models."""
