"""``megatron-muon bench step``: optimizer steps of AdamW and kinds of Muon, in
turns.
"""
