"""The step of Distributed Muon on one rank: tensors, and every collective."""
