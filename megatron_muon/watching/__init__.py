"""What a logging step writes: sums over pieces, numbers of whole matrices, one message, a line."""
