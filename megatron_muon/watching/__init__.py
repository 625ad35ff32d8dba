"""A logging step's record: sums over pieces, numbers of whole matrices, one message, a line."""
