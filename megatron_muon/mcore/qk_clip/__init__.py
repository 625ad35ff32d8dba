"""QK-Clip on shards: heads whose attention logits pass a threshold get smaller query and key rows.

The largest logit of each head is collected during a step's forward passes, by Transformer Engine's
attention or here (``local``), and reduced over the stage. ``clip`` then scales what each rank holds
of the weights, by the factors of ``factors`` for the rows of ``heads``. Source: Kimi K2
(arXiv 2507.20534), section 2.1; the operations are those of Megatron's ``clip_qk`` (core 0.16).
"""
