"""The optimizers that ``megatron-muon bench step`` compares, each over a model of its own.

All have the same weights and gradients, the same decay, Nesterov and number of Newton-Schulz steps,
and a step ends with the updated parameters on every rank: Megatron's all-gather is in it, as it is
without ``--overlap-param-gather``.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from dataclasses import dataclass
from typing import Literal

from megatron_muon.config import MuonConfig

Kind = Literal["adamw", "muon", "paper", "upstream"]
TpMode = Literal["duplicated", "blockwise"]

# A fifth of a layer is what Megatron's buckets of 40 M elements have of Llama-3-8B's layers.
BUCKETS_PER_LAYER = 5
# The norm is taken but no gradient scaled: a norm summed in another order has other last bits, and
# rows could no longer be held to each other bit by bit.
NO_CLIP = 1e9


@dataclass(frozen=True, slots=True)
class Row:
    """An optimizer to measure.

    Attributes:
        name: in the table and in JSON.
        kind: the kind of optimizer.
        config: ours, and of the numbers that others have too.
        buckets: Megatron's stock ones, as with ``--overlap-grad-reduce``; else one a buffer.
        tp_mode: upstream's ``muon_tp_mode``.
    """

    name: str
    kind: Kind
    config: MuonConfig
    buckets: bool = False
    tp_mode: TpMode = "duplicated"


def rows(config: MuonConfig, names: list[str], exchanges: list[str], tp_mode: TpMode) -> list[Row]:
    """The rows to measure.

    Args:
        config: ours.
        names: names among ``flags.ROWS``; no other row is made, but for ``exchanges``.
        exchanges: further rows of muon-contiguous: ``none`` of rounds (all matrices in one), or
            ``naive``, every parameter a round of its own.
        tp_mode: upstream's.

    Returns:
        Rows with the standard iteration first, those on ``auto`` after them.
    """
    from megatron_muon.mcore.params.bucket_layout import takes_layouts

    equal = dataclasses.replace(config, ns_iteration="standard")
    aligned = dataclasses.replace(equal, align_shards=takes_layouts())
    contiguous = Row("muon-contiguous", "muon", aligned)
    bucketed = Row("muon-bucketed", "muon", equal, buckets=True)
    made = [
        Row("adamw", "adamw", equal),
        contiguous,
        bucketed,
        Row("muon-paper", "paper", equal, buckets=True),
        Row("upstream-layerwise", "upstream", equal, tp_mode=tp_mode),
        _on_auto(contiguous),
        _on_auto(bucketed),
    ]
    variants = []
    for exchange in dict.fromkeys(exchanges):
        round_bytes = {"none": 1 << 62, "naive": 1}[exchange]
        other = dataclasses.replace(aligned, round_bytes=round_bytes)
        variants.append(Row(f"muon-contiguous-{exchange}", "muon", other))
    asked = [row for row in made if row.name in names]
    standard = [row for row in asked if row.config.ns_iteration == "standard"]
    return [*standard, *variants, *asked[len(standard) :]]


def _on_auto(row: Row) -> Row:
    config = dataclasses.replace(row.config, ns_iteration="auto")
    return dataclasses.replace(row, name=f"{row.name}-auto", config=config)


def bucket_elements(flags: Namespace) -> int:
    """Elements from which on a stock bucket is closed, if no flag says otherwise.

    Megatron's 40 M elements would be one bucket of a model this size, which is not what a large
    one has.
    """
    hidden = int(flags.hidden_size)
    ffn = int(flags.ffn_hidden_size or 4 * hidden)
    layer = (4 * hidden + 2 * ffn) * hidden // int(flags.tensor_model_parallel_size)
    return min(40_000_000, max(1, layer // BUCKETS_PER_LAYER))
