"""Small models, and stand-ins for what they may be made of."""
