"""Triton's kernels in its interpreter, and as they are compiled."""
