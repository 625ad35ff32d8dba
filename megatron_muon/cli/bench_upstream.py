"""Megatron's own Muon of core 0.16 and 0.17 over whole parameters as a row of the benchmark.

Built as ``--optimizer dist_muon`` does (``LayerWiseDistributedOptimizer``), its parts named for the
watch. gloo has no all-gather of unequal parts, which its step ends with: there each part is
broadcast, all of them under way together, as NCCL does it, and as ``megatron_muon.cpu`` gathers the
equal parts that Megatron's DistributedOptimizer ends its step with.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon import collectives
from megatron_muon.cli.bench_meter import NEWTON_SCHULZ
from megatron_muon.cli.bench_rows import NO_CLIP, Row

_TP_GATHER = "muon-tp_gather"


def upstream_optimizer(row: Row, chunks: Sequence[Any], timers: Any) -> Any:
    """Megatron's ``LayerWiseDistributedOptimizer``; every rank of the world calls it."""
    core = importlib.import_module("megatron.core.optimizer")
    muon = importlib.import_module("megatron.core.optimizer.muon")
    config = core.OptimizerConfig(
        optimizer="muon",
        lr=1e-3,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=False,
        clip_grad=NO_CLIP,
        muon_momentum=row.config.momentum,
        muon_use_nesterov=row.config.nesterov,
        muon_num_ns_steps=row.config.ns_steps,
        muon_extra_scale_factor=row.config.matched_adamw_rms,
        muon_tp_mode=row.tp_mode,
    )
    config.timers = timers
    optimizer = muon.get_megatron_muon_optimizer(
        config,
        list(chunks),
        core.get_standard_config_overrides(config),
        layer_wise_distributed_optimizer=True,
    )
    optimizer.step = _named(optimizer, timers)
    return optimizer


def _named(optimizer: Any, timers: Any) -> Callable[[], Any]:
    """Its ``step`` with its parts under ours' names."""
    gather = optimizer.allgather_params

    def allgather_params() -> None:
        with timers.part("params-all-gather"):
            gather()

    optimizer.allgather_params = allgather_params
    step = optimizer.step

    def named_step() -> Any:
        with _parts(timers):
            return step()

    return named_step


@contextmanager
def _parts(timers: Any) -> Iterator[None]:
    """Within it the functions that upstream calls by name are timed, and unequal parts broadcast.

    ``newton_schulz_tp`` gathers over TP and then calls ``newton_schulz``: what the second does not
    take of the first is the gather.
    """
    utils = importlib.import_module("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    muon = importlib.import_module("megatron.core.optimizer.muon")
    replaced = [
        (utils, "newton_schulz", _timed(utils.newton_schulz, timers, NEWTON_SCHULZ)),
        (muon, "newton_schulz_tp", _timed(muon.newton_schulz_tp, timers, _TP_GATHER)),
        (dist, "all_gather", _uneven(dist.all_gather)),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def _timed(function: Callable[..., Any], timers: Any, part: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        with timers.part(part):
            return function(*args, **kwargs)

    return timed


def _uneven(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    def gather(parts: Sequence[torch.Tensor], mine: torch.Tensor, group: Any = None) -> Any:
        same = len({part.numel() for part in parts}) == 1
        if same or dist.get_backend(group) != "gloo":
            return all_gather(parts, mine, group=group)
        parts[group.rank()].copy_(mine)
        return collectives.start_broadcasts("params/gather", [parts], group).wait()

    return gather
