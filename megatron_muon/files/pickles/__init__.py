"""Pickles read as data: no byte of a pickle chooses code that runs."""
