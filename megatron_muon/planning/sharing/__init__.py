"""Matrices that several homes share: where they are cut, and what a strip costs."""
