"""The optimizers that ``megatron-muon bench step`` compares, each over a model of its own.

All have the same weights and gradients, the same decay, Nesterov and number of Newton-Schulz steps,
and a step ends with the updated parameters on every rank: Megatron's all-gather is in it, as it is
without ``--overlap-param-gather``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

import megatron_muon
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
    """What is measured.

    Attributes:
        name: in the table and in JSON.
        kind: whose optimizer.
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
    """Those to measure.

    Args:
        config: of ours.
        names: of ``bench_flags.ROWS``; no other row is made, but for ``exchanges``.
        exchanges: further rows of muon-contiguous: ``none`` of rounds (all matrices in one), or
            ``naive``, every parameter a round of its own.
        tp_mode: of upstream.

    Returns:
        Rows with the standard iteration first, those on ``auto`` after them.
    """
    from megatron_muon.mcore.ordered import takes_layouts

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


@dataclass(frozen=True, slots=True)
class Built:
    """A row's model and optimizer on a rank.

    Attributes:
        chunks: of the model, each in its DDP.
        optimizer: Megatron's.
        lines: that ours prints about itself.
    """

    chunks: list[Any]
    optimizer: Any
    lines: list[str]


def build(row: Row, flags: Namespace, timers: Any) -> Built:
    """Make a row on this rank; every rank of the world calls it.

    Args:
        row: which.
        flags: of the model, see ``flags``; Megatron's groups are there.
        timers: for Megatron's ``OptimizerConfig``.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_muon.cli.chunks import build_chunks
    from megatron_muon.cli.model import ranks_of, transformer_config

    own = Namespace(**vars(flags))
    own.overlap_grad_reduce = row.buckets
    if row.buckets and own.ddp_bucket_size is None and own.ddp_num_buckets is None:
        own.ddp_bucket_size = bucket_elements(own)
    model_parallel_cuda_manual_seed(1)
    config = transformer_config(own, ranks_of(own))
    device = torch.device(torch.cuda.current_device())
    with contextlib.redirect_stdout(io.StringIO()) as printed, _installed(row):
        chunks = build_chunks(own, config, device=device, **_wrapping(row))
        optimizer = _optimizer(row, own, chunks, timers)
    if row.kind == "paper":
        _make_papers(optimizer)
    return Built(chunks, optimizer, printed.getvalue().splitlines())


def _wrapping(row: Row) -> dict[str, Any]:
    """How ``build_chunks`` puts a row's model into its DDP."""
    if row.kind != "upstream":
        return {}
    from megatron_muon.cli.bench_upstream import layouts, lays_out_buffers

    return {"layouts": layouts} if lays_out_buffers() else {"distributed_optimizer": False}


@contextlib.contextmanager
def _installed(row: Row) -> Iterator[None]:
    """Muon is ours within it, where it is so in the row; also as parameters are laid out."""
    if row.kind not in ("muon", "paper"):
        yield
        return
    megatron_muon.install(row.config)
    try:
        yield
    finally:
        megatron_muon.uninstall()


def _optimizer(row: Row, flags: Namespace, chunks: list[Any], timers: Any) -> Any:
    import megatron.core.optimizer as core

    if row.kind == "upstream":
        from megatron_muon.cli.bench_upstream import upstream_optimizer

        return upstream_optimizer(row, chunks, timers)
    config = core.OptimizerConfig(
        optimizer="adam" if row.kind == "adamw" else "muon",
        lr=1e-3,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=NO_CLIP,
    )
    config.timers = timers
    return core.get_megatron_optimizer(config, chunks)


def _make_papers(optimizer: Any) -> None:
    from megatron.core import parallel_state

    from megatron_muon.cli.bench_paper import PaperMuon
    from megatron_muon.mcore.groups import has_experts

    for part in optimizer.chained_optimizers:
        if part.muon is None:
            continue
        experts = has_experts(part)
        tp_group = (
            parallel_state.get_expert_tensor_parallel_group()
            if experts
            else parallel_state.get_tensor_model_parallel_group()
        )
        PaperMuon.take_over(part.muon, part, part.stage_group.rank(), tp_group)
