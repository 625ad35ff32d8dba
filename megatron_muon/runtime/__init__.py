"""The engine: it moves slices to homes and results back in rounds, and knows no
rule.
"""
