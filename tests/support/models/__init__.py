"""Small models, and stand-ins for modules that they may contain."""
