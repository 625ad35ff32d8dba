"""Commands that print a figure of the documents: ``cd tests; python -m
figures.NAME``.
"""
