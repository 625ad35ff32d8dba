"""The checks of ``megatron-muon accept``; each runs in a process of its own."""
