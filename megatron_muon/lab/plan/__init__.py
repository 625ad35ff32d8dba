"""``megatron-muon plan``: a run's step priced on stated hardware, with what would be
faster.
"""
