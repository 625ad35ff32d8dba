"""The expected result of a run, and how far other roundings may differ from it."""
