"""``megatron-muon routes``: which parameters are Muon's, in what matrices, and their
homes.
"""
