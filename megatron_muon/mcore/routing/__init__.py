"""The optimizer of each parameter, and the matrices that lie in it."""
