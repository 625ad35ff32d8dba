"""How many homes share a matrix: the price of a strip, and the time of a stage."""
