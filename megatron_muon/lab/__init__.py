"""Tools beside training, which no training process imports."""
