"""``megatron-muon checkpoint``: what is in a checkpoint, read as data, without
a GPU.
"""
