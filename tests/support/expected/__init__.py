"""What a run must come to, and how far other roundings may take it from there."""
