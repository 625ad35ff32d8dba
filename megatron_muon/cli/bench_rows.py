"""The optimizers that ``megatron-muon bench step`` compares, each over a model of its own.

All have the same weights and gradients, the same decay, Nesterov and number of Newton-Schulz steps,
and a step ends with the updated parameters on every rank: Megatron's all-gather is in it, as it is
without ``--overlap-param-gather``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
from argparse import Namespace
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
        names: of the rows, without their variants.
        exchanges: further rows of muon-contiguous: ``none`` of rounds (all matrices in one), or
            ``naive``, every parameter a round of its own.
        tp_mode: of upstream.
    """
    equal = dataclasses.replace(config, ns_iteration="standard")
    found = [
        Row("adamw", "adamw", equal),
        Row("muon-contiguous", "muon", equal),
        Row("muon-bucketed", "muon", equal, buckets=True),
        Row("muon-paper", "paper", equal, buckets=True),
        Row("upstream-layerwise", "upstream", equal, tp_mode=tp_mode),
    ]
    found = [row for row in found if row.name in names]
    for exchange in exchanges:
        round_bytes = {"none": 1 << 62, "naive": 1}[exchange]
        other = dataclasses.replace(equal, round_bytes=round_bytes)
        found.append(Row(f"muon-contiguous-{exchange}", "muon", other))
    auto = dataclasses.replace(config, ns_iteration="auto")
    return found + [
        Row(f"{row.name}-auto", "muon", auto, row.buckets)
        for row in found
        if row.name in ("muon-contiguous", "muon-bucketed")
    ]


def why_no_upstream() -> str | None:
    """Why Megatron's own Muon cannot be measured here; None where it can."""
    from megatron_muon.mcore.hooks import megatron_version

    name, version = megatron_version()
    if version < (0, 16):
        return f"megatron-core {name} has no Muon of its own: 0.16 and 0.17 are known here"
    if version >= (0, 18):
        return f"how megatron-core {name} builds its own Muon is not known here: 0.16 and 0.17's is"
    for package in ("absl", "emerging_optimizers"):
        if importlib.util.find_spec(package) is None:
            return (
                f"{package} is not importable: Megatron's own Muon of core {name} needs absl-py "
                "and v0.1.0 of https://github.com/NVIDIA-NeMo/Emerging-Optimizers on PYTHONPATH"
            )
    return None


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
    chunks = build_chunks(
        own,
        config,
        distributed_optimizer=row.kind != "upstream",
        device=torch.device(torch.cuda.current_device()),
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        optimizer = _optimizer(row, own, chunks, timers)
    return Built(chunks, optimizer, printed.getvalue().splitlines())


def _optimizer(row: Row, flags: Namespace, chunks: list[Any], timers: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if row.kind == "upstream":
        from megatron_muon.cli.bench_upstream import upstream_optimizer

        return upstream_optimizer(row, chunks, timers)
    config = OptimizerConfig(
        optimizer="adam" if row.kind == "adamw" else "muon",
        lr=1e-3,
        weight_decay=0.1,
        bf16=flags.bf16,
        params_dtype=torch.bfloat16 if flags.bf16 else torch.float32,
        use_distributed_optimizer=True,
        clip_grad=NO_CLIP,
    )
    config.timers = timers
    if row.kind == "adamw":
        return get_megatron_optimizer(config, chunks)
    megatron_muon.install(row.config)
    try:
        import megatron.core.optimizer as hooked

        optimizer = hooked.get_megatron_optimizer(config, chunks)
    finally:
        megatron_muon.uninstall()
    if row.kind == "paper":
        _make_papers(optimizer)
    return optimizer


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
