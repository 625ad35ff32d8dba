"""Newton-Schulz: the choice of an iteration for a matrix, its products, and their
rounding.
"""
