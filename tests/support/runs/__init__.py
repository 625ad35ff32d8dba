"""Runs of the tiny models: what they compute, how they train, what they log, what
disturbs them.
"""
