"""The optimizers that ``megatron-muon bench step`` compares, each with its own copy of
the model.

All have the same weights, gradients, weight decay, Nesterov setting and number of
Newton-Schulz steps. A step ends with the updated parameters on every rank: it includes
Megatron's all-gather, as a run without ``--overlap-param-gather`` does.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_muon.settings.config import MuonConfig

Kind = Literal["adamw", "muon", "upstream"]

# Megatron's own Muon, by its mode of TP.
UPSTREAM = ("upstream-blockwise", "upstream-duplicated", "upstream-distributed")
# Megatron's buckets of 40 M elements hold about a fifth of a layer of Llama-3-8B.
BUCKETS_PER_LAYER = 5
# Of each row's OptimizerConfig. The norm is computed, but no gradient is clipped: rows
# sum the norm in different orders, so its last bits differ, and clipped rows could not
# be compared bit by bit.
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "bf16": True, "clip_grad": 1e9}


@dataclass(frozen=True, slots=True)
class Row:
    """An optimizer to measure."""

    name: str  # name in the table and in JSON
    kind: Kind  # kind of optimizer
    # settings of our Muon; other optimizers take those that they have, too
    config: MuonConfig
    # Megatron's stock ones (--overlap-grad-reduce); else one a buffer
    buckets: bool = False


def rows(
    config: MuonConfig,
    names: Sequence[str],
    exchanges: Sequence[str] = (),
) -> list[Row]:
    """The rows to measure: the standard iteration's, then those on ``auto``, in
    ``fast``'s dtype.

    ``exchanges`` are further rows of muon-contiguous: ``none`` puts all matrices into
    one round, ``naive`` gives every parameter a round of its own.
    """
    # all rows have the same matrices at one home
    whole = config.split_matrices or "off"
    equal = dataclasses.replace(config, ns_iteration="standard", split_matrices=whole)
    contiguous = Row("muon-contiguous", "muon", equal)
    bucketed = Row("muon-bucketed", "muon", equal, buckets=True)
    made = [
        Row("adamw", "adamw", equal),
        contiguous,
        bucketed,
        *(Row(name, "upstream", equal) for name in UPSTREAM),
        _on_auto(contiguous),
        _on_auto(bucketed),
    ]
    variants = []
    for exchange in dict.fromkeys(exchanges):
        round_bytes = {"none": 1 << 62, "naive": 1}[exchange]
        other = dataclasses.replace(equal, round_bytes=round_bytes)
        variants.append(Row(f"muon-contiguous-{exchange}", "muon", other))
    asked = [row for row in made if row.name in names]
    standard = [row for row in asked if row.config.ns_iteration == "standard"]
    return [*standard, *variants, *asked[len(standard) :]]


def _on_auto(row: Row) -> Row:
    config = dataclasses.replace(row.config, ns_iteration="auto", preset="fast")
    return dataclasses.replace(row, name=f"{row.name}-auto", config=config)


def bucket_elements(flags: Namespace) -> int:
    """Number of elements at which a stock bucket is closed, if no flag says otherwise.

    With Megatron's 40 M elements a small model would have one bucket, unlike a large
    one.
    """
    hidden = int(flags.hidden_size)
    ffn = int(flags.ffn_hidden_size or 4 * hidden)
    layer = (4 * hidden + 2 * ffn) * hidden // int(flags.tensor_model_parallel_size)
    return min(40_000_000, max(1, layer // BUCKETS_PER_LAYER))
