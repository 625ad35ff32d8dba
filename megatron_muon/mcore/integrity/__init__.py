"""Whether a checkpoint is whole, unchanged and of this model: its digest, on all ranks."""
