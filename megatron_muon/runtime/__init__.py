"""The step of Distributed Muon on a rank: tensors, and every collective."""
