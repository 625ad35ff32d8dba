"""``megatron-muon checkpoint inspect``: what is in a checkpoint, read as data, without
a GPU.
"""
