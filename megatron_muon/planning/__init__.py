"""Who orthogonalizes which matrix, and what travels when: integers, the same on every rank."""
