"""Megatron's own Muon over the tiny GPT, and checkpoints in its layout. The functions
run on ranks.

It needs emerging_optimizers, which is on no package registry: a checkout of
NVIDIA-NeMo/Emerging-Optimizers first on PYTHONPATH, of v0.1.0 for cores 0.16 and 0.17,
of v0.2.0 for later ones.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from support.checkpoints import saving
from support.installed import VERSION
from support.models.gpt import (
    MEGATRONS,
    Built,
    Case,
    Topology,
    build,
    set_schedule,
    stepped,
    whole_grad,
)
from support.models.gpt import held as held_here

MU = 0.9


def lacking() -> str | None:
    """Why Megatron's own Muon cannot be run here; None where it can."""
    if VERSION < (0, 16):
        return "this megatron-core has no Muon of its own"
    if importlib.util.find_spec("emerging_optimizers") is None:
        return "emerging_optimizers is not on PYTHONPATH"
    return None


def as_sum(mean: Tensor, mu: float = MU) -> Tensor:
    """Megatron's own momentum as the one here, in fp32: (1-μ) Σ μ^k G as Σ μ^k G."""
    return mean * (1 / (1 - mu))


# --- the real one ---------------------------------------------------------------------


def trained(
    case: Case,
    topology: Topology,
    layer_wise: bool,
    folder: str,
    precision: str = "medium",
) -> dict[str, Any]:
    """Take the case's steps, save, take one more; what this rank holds before and after
    that.

    Args:
        layer_wise: whole weights are shared out over the DP ranks (``dist_muon``); else
            every rank has all of them.
        precision: of its Newton-Schulz; ``medium`` is bf16, ``highest`` fp32.
    """
    built = build(replace(case, optimizer=MEGATRONS), topology)
    built.optimizer = _optimizer(built, layer_wise, precision)
    for step in range(case.steps):
        _take_step(built, step)
    state = saving.sharded_models(built)
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    state["optimizer"] = built.optimizer.sharded_state_dict(state, metadata=metadata)
    saving.write(state, folder)
    before = held(built, layer_wise)
    _take_step(built, case.steps)
    return {"before": before, "after": held(built, layer_wise)}


def _optimizer(built: Built, layer_wise: bool, precision: str) -> Any:
    """As ``train`` of Megatron-LM makes it."""
    from megatron.core import optimizer as core

    case = built.case
    config = core.OptimizerConfig(
        optimizer="muon",
        lr=case.lr,
        min_lr=0.0,
        weight_decay=case.weight_decay,
        clip_grad=case.clip,
        bf16=case.dtype == torch.bfloat16,
        params_dtype=case.dtype,
        use_distributed_optimizer=False,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        muon_momentum=MU,
        muon_fp32_matmul_prec=precision,
        muon_tp_mode="blockwise",
    )
    if VERSION >= (0, 18):
        config.use_layer_wise_distributed_optimizer = layer_wise
        return core.get_megatron_optimizer(config, built.chunks)
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    return get_megatron_muon_optimizer(
        config,
        built.chunks,
        core.get_standard_config_overrides(config),
        layer_wise_distributed_optimizer=layer_wise,
    )


@torch.no_grad()
def _take_step(built: Built, step: int) -> None:
    set_schedule(built, step)
    for chunk in built.chunks:
        chunk.zero_grad_buffer()
    for name, param in built.params.items():
        param.main_grad.copy_(built.local(name, whole_grad, step))
    ok, _, _ = built.optimizer.step()
    assert ok
    built.optimizer.zero_grad()


def held(built: Built, layer_wise: bool) -> dict[str, Any]:
    """As ``gpt.held``: whole parameters and what this rank has of their state, all of
    some.
    """
    from megatron.core import parallel_state as ps

    names = built.names
    groups = {
        True: ps.get_data_parallel_group(with_context_parallel=True),
        # what Megatron marks as not all-reduced
        False: ps.get_expert_data_parallel_group(),
    }
    all_of_a_group = {
        dense: tuple(torch.distributed.get_process_group_ranks(group))
        for dense, group in groups.items()
    }
    alone = (torch.distributed.get_rank(),)
    shards = {}
    for param, main, state in _owned(built.optimizer):
        tensors = {
            "main": main,
            **{k: v for k, v in state.items() if v.numel() == main.numel()},
        }
        if "momentum_buffer" in tensors:
            tensors["exp_avg"] = as_sum(tensors.pop("momentum_buffer"))
        arrays = {
            kind: t.detach().float().flatten().numpy().copy()
            for kind, t in tensors.items()
        }
        shards[names[id(param)]] = (0, main.numel(), arrays)
    return {
        "pieces": built.pieces,
        "params": {
            n: p.detach().float().numpy().copy() for n, p in built.params.items()
        },
        "owners": {
            name: all_of_a_group[getattr(param, "allreduce", True)]
            if layer_wise
            else alone
            for name, param in built.params.items()
        },
        "shards": shards,
    }


def _owned(optimizer: Any) -> Iterator[tuple[Any, Tensor, dict[str, Tensor]]]:
    """(model parameter, fp32 main parameter, its state)."""
    for part in optimizer.chained_optimizers:
        state = part.optimizer.state
        if hasattr(part, "float16_groups"):
            groups = zip(
                part.float16_groups, part.fp32_from_float16_groups, strict=True
            )
            for params, mains in groups:
                for param, main in zip(params, mains, strict=True):
                    yield param, main, state[main]
        else:
            for param in part.get_parameters():
                yield param, param, state[param]


# --- its layout, by this package's Muon -----------------------------------------------


def imitated(case: Case, topology: Topology, folder: str) -> dict[str, Any]:
    """Train with the plugin, save what it has in the layout of Megatron's own Muon, and
    return what this rank held, the momentum as it is once it was a mean.
    """
    from megatron_muon.mcore.checkpoint.chain import WHOLE_WEIGHTS

    built = stepped(case, topology)
    state = saving.sharded(built, WHOLE_WEIGHTS, is_loading=False)
    ours = state["optimizer"]
    parts = [ours] if "param_state" in ours else list(ours.values())
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in parts[0]["optimizer"]["param_groups"]
    ]
    theirs = [
        {k: v for k, v in group.items() if k not in ("betas", "eps")}
        for group in groups
    ]
    for group in theirs:
        group["momentum_beta"] = MU
        group.pop("step", None)
    state["optimizer"] = {
        0: {
            "optimizer": {"param_groups": theirs},
            "tensors": {
                n: _renamed(part["param_state"]) for n, part in enumerate(parts)
            },
        },
        1: {"optimizer": {"param_groups": groups}},
    }
    saving.write(state, folder)
    result = held_here(built)
    for _, _, arrays in result["shards"].values():
        if "exp_avg_sq" not in arrays:
            arrays["exp_avg"] = as_sum(
                _as_mean(torch.from_numpy(arrays["exp_avg"]))
            ).numpy()
    return result


def _renamed(state: Any) -> Any:
    if isinstance(state, dict):
        return {str(name): _renamed(value) for name, value in state.items()}
    if ".muon_momentum." in state.key:
        key = state.key.replace(".muon_momentum.", ".momentum_buffer.")
        return replace(state, key=key, data=_as_mean(state.data))
    return replace(state, key=state.key.replace(".state.param.", ".state.fp32_param."))


def _as_mean(momentum: Tensor) -> Tensor:
    return momentum * (1 - MU)
