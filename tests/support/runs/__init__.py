"""Runs of the tiny models: what each computes, how it trains, what it logs, what
disturbs it.
"""
