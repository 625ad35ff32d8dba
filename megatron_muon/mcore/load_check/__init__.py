"""The digest of a checkpoint: written at the end of a save, checked before a load."""
