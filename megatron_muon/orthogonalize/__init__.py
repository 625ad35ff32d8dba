"""Newton-Schulz: which iteration a matrix gets, its products, and what they round to."""
