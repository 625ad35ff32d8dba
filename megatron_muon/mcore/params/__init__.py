"""Which parameters are Muon's, their matrices, and where they lie in Megatron's buffers."""
