"""What is done to a matrix, one file a rule; ``runtime`` moves its elements there and
back.
"""
