"""Messages of a step: slices and directions, and those between the homes of one
matrix.
"""
