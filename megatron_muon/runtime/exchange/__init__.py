"""Messages of a step: slices and results, and those between the homes of one
matrix.
"""
