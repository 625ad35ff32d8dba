"""Megatron's own Muon over whole parameters as a row of the benchmark.

Its ``LayerWiseDistributedOptimizer`` is built as Megatron-LM does by default: in core
0.16 and 0.17 with ``--optimizer dist_muon``, later with ``--optimizer muon
--use-distributed-optimizer``. The latter lays out and pads buffers so that shards cut
no matrix, and leaves other parameters to a DistributedOptimizer. Functions of the step
are wrapped so that the stopwatch times its parts. It runs the coefficients of the other
rows, by a wrapper since its flag for them came with 0.17.

In 0.16 and 0.17 a step ends with an all-gather of unequal parts, which gloo lacks.
There the parts are broadcast concurrently, as NCCL does it, and as
``megatron_muon.cpu`` gathers the equal parts of Megatron's DistributedOptimizer.
"""

from __future__ import annotations

import importlib
import importlib.util
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.lab.bench.seams import UPSTREAM
from megatron_muon.lab.bench.step.meter import NEWTON_SCHULZ, PARAM_GATHER
from megatron_muon.lab.bench.step.rows import OPTIONS, Row
from megatron_muon.mcore.seams.rows import check_rows, megatron_version
from megatron_muon.presence import SeamError
from megatron_muon.runtime import collectives
from megatron_muon.runtime.patches import replaced

_TP_GATHER = "muon-tp_gather"
# Versions of Emerging-Optimizers in Megatron's pyproject.toml, by the minor version of
# core.
_PACKAGES = {16: "0.1", 17: "0.1", 18: "0.2", 19: "0.2", 20: "0.3"}


def why_no_upstream(flags: Namespace) -> str | None:
    """Why Megatron's own Muon cannot be measured here; None where it can."""
    name, version = megatron_version()
    wanted = _PACKAGES.get(version[1])
    if wanted is None:
        known = f"0.{min(_PACKAGES)} to 0.{max(_PACKAGES)}"
        return (
            f"megatron-core {name} has no Muon of its own that is known here: "
            f"{known} have one"
        )
    if flags.num_distributed_optimizer_instances > 1:
        return (
            "it has one optimizer instance: remove "
            "--num-distributed-optimizer-instances to measure it"
        )
    needed = (
        f"Megatron's own Muon of core {name} needs absl-py and v{wanted}.0 of "
        "https://github.com/NVIDIA-NeMo/Emerging-Optimizers on PYTHONPATH"
    )
    for package in ("absl", "emerging_optimizers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not importable: {needed}"
    installed = str(importlib.import_module("emerging_optimizers").__version__)
    if not installed.startswith(f"{wanted}."):
        return f"emerging_optimizers is {installed}: {needed}"
    try:
        importlib.import_module("emerging_optimizers.orthogonalized_optimizers")
    except ImportError as error:
        return f"emerging_optimizers cannot be imported ({error}): {needed}"
    if not _muon_module().HAVE_EMERGING_OPTIMIZERS:
        return (
            f"megatron-core {name} does not find the emerging_optimizers that is "
            "importable, since it asks for what pip has installed: pip install "
            "--no-deps that checkout"
        )
    try:
        check_rows(UPSTREAM)
    except SeamError as error:
        return str(error)
    return None


def _muon_module() -> Any:
    """The module of Megatron's own Muon, which calls ``newton_schulz_tp``."""
    name = "emerging_optimizers" if lays_out_buffers() else "muon"
    return importlib.import_module(f"megatron.core.optimizer.{name}")


def lays_out_buffers() -> bool:
    """Whether Megatron's own Muon shards by a layout of grad buffers: from core 0.18
    on.
    """
    return megatron_version()[1] >= (0, 18)


def layouts(chunks: Sequence[Any], ddp_config: Any) -> list[dict[str, Any]]:
    """The layout of each chunk's buffers, as arguments for Megatron's DDP; marks
    parameters.

    Chunks are not wrapped in DDP yet; its config has one bucket per buffer.
    """
    from megatron.core import parallel_state as ps

    layer_wise = importlib.import_module("megatron.core.optimizer.layer_wise_optimizer")
    layer_wise.tag_params_for_buffer_routing(chunks)
    kind = layer_wise.LayerWiseDistributedOptimizer
    return [
        {
            "full_param_layout": kind.compute_full_param_layout(
                [param for param in chunk.parameters() if param.requires_grad],
                ddp_config.bucket_size,
                ps.get_data_parallel_world_size(with_context_parallel=True),
                ddp_config,
                expert_data_parallel_world_size=ps.get_expert_data_parallel_world_size(),
            )
        }
        for chunk in chunks
    ]


def upstream_optimizer(row: Row, chunks: Sequence[Any], timers: Any) -> Any:
    """Megatron's ``LayerWiseDistributedOptimizer``; every rank of the world calls
    it.
    """
    core = importlib.import_module("megatron.core.optimizer")
    since_18 = lays_out_buffers()
    changed = {"muon_use_nesterov": row.config.nesterov}
    if since_18:
        changed = {
            "muon_nesterov": row.config.nesterov,
            "use_layer_wise_distributed_optimizer": True,
        }
    config = core.OptimizerConfig(
        optimizer="muon",
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=False,
        muon_momentum=row.config.momentum,
        muon_num_ns_steps=row.config.ns_steps,
        muon_extra_scale_factor=row.config.matched_adamw_rms,
        muon_tp_mode=row.name.removeprefix("upstream-"),
        **OPTIONS,
        **changed,
    )
    config.timers = timers
    overrides = core.get_standard_config_overrides(config)
    if since_18:
        optimizer = core.get_megatron_optimizer(config, list(chunks), overrides)
        parts = getattr(optimizer, "chained_optimizers", [])
        for part in (optimizer, *parts):
            if hasattr(part, _GATHERS[1]):
                timers.time(part, _GATHERS[1], PARAM_GATHER)
    else:
        muon = importlib.import_module("megatron.core.optimizer.muon")
        optimizer = muon.get_megatron_muon_optimizer(
            config, list(chunks), overrides, layer_wise_distributed_optimizer=True
        )
        timers.time(optimizer, _GATHERS[0], PARAM_GATHER)
    step = optimizer.step

    def named_step() -> Any:
        with _parts(row, timers):
            return step()

    optimizer.step = named_step
    return optimizer


# Method names of its all-gather of parameters: in 0.16 and 0.17, and later.
_GATHERS = ("allgather_params", "start_param_sync_for_bucket_group_subset")


@contextmanager
def _parts(row: Row, timers: Any) -> Iterator[None]:
    """A context in which functions of the step are timed, and gloo broadcasts unequal
    parts.

    ``newton_schulz_tp`` gathers over TP, then calls ``newton_schulz``: the time of the
    first without the second is that of the gather. ``distributed`` adds squares within
    the second.
    """
    utils = importlib.import_module(
        "emerging_optimizers.orthogonalized_optimizers.muon_utils"
    )
    muon = _muon_module()
    newton_schulz_tp = muon.newton_schulz_tp

    def over_tp(*args: Any, **kwargs: Any) -> Any:
        # both packages have the same names of sets
        kwargs["coefficient_type"] = row.config.ns_coefficients
        return newton_schulz_tp(*args, **kwargs)

    iteration = timers.timed(utils.newton_schulz, NEWTON_SCHULZ)
    of_squares, of_others = timers.timed(dist.all_reduce, _TP_GATHER), dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        in_iteration = timers.inside == NEWTON_SCHULZ
        return (of_squares if in_iteration else of_others)(*args, **kwargs)

    with (
        replaced(utils, newton_schulz=iteration),
        replaced(muon, newton_schulz_tp=timers.timed(over_tp, _TP_GATHER)),
        replaced(dist, all_gather=_uneven(dist.all_gather)),
        replaced(dist, all_reduce=all_reduce),
    ):
        yield


def _uneven(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    def gather(
        parts: Sequence[torch.Tensor], mine: torch.Tensor, group: Any = None
    ) -> Any:
        same = len({part.numel() for part in parts}) == 1
        if same or dist.get_backend(group) != "gloo":
            return all_gather(parts, mine, group=group)
        parts[group.rank()].copy_(mine)
        return collectives.start_broadcasts("params/gather", [parts], group).wait()

    return gather
