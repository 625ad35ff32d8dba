"""Megatron's bucket groups, which reduce gradients and gather parameters, as Muon trains them."""
