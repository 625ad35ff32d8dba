"""The buckets of a grad buffer: how many, and in which order their parameters lie."""
