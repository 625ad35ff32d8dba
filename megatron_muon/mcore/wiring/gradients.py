"""Megatron's parameter groups, gradients, norm and loss scale, as far as Muon's step
needs them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megatron_muon.console import first_names
from megatron_muon.mcore.host.process_groups import Stage
from megatron_muon.mcore.host.shards import owned_shards
from megatron_muon.mcore.routing.param_routing import (
    Weight,
    expert_name,
    is_cut,
)
from megatron_muon.mcore.routing.routes import Route
from megatron_muon.runtime.nonfinite import HostCopy
from megatron_muon.runtime.patches import turn_into

# Megatron's marks on parameters.
_CUT_BY_TP = "tensor_model_parallel"
_ADDED_UP = "sequence_parallel"
_READ = ("lr", "weight_decay")
_UNCHANGED = "no optimizer state or parameter has been changed"


class LateNorm(HostCopy):
    """Megatron's norm, reduced over all ranks."""

    def require_finite(self) -> None:
        """Raise a FloatingPointError with the way out if the norm is not finite."""
        self.wait()  # rarely, since a forward and a backward lie between
        value = float(self.tensor)
        if not math.isfinite(value):
            raise FloatingPointError(
                f"The previous step's gradient norm was {value}: gradients were "
                "missing, NaN, Inf or above 1e19. That step has already changed "
                "parameters in memory: resume from the last checkpoint. With "
                "--check-for-nan-in-loss-and-grad Megatron names the first bucket with "
                "such gradients before a step"
            )


def norm_grads(
    counted: list[Tensor], grads: list[Tensor | None], device: torch.device
) -> list[Tensor]:
    """The gradients of Megatron's norm, made NaN if a gradient outside the norm cannot
    be used.

    If several ranks have a gradient (TP replica, shared embedding), only one of them
    counts it.

    Args:
        counted: gradients that Megatron puts in the norm, each ``(n,)``.
        grads: those of all shards that this rank holds; None: missing.

    Returns:
        ``counted``; if there are other gradients, 0 or NaN is added to a copy of one of
        them.
    """
    there = {id(grad) for grad in counted}
    if any(grad is None for grad in grads):
        unusable = torch.full((), math.nan, device=device)
    else:
        others = [
            g for g in grads if g is not None and g.numel() and id(g) not in there
        ]
        if not others:
            return counted
        unusable = torch.stack(torch._foreach_norm(others, math.inf)).amax() * 0.0
    if not counted:
        return [unusable.view(1)]
    smallest = min(range(len(counted)), key=lambda at: counted[at].numel())
    replaced = list(counted)
    replaced[smallest] = counted[smallest] + unusable
    return replaced


def share_loss_scale(dist_opts: Sequence[Any]) -> None:
    """Give all optimizers of a model, as Megatron built them, the scaler of the first,
    if any.

    Megatron gives each DistributedOptimizer a dynamic scaler of its own. It multiplies
    the loss by the dense scale and divides each gradient by the scale of its optimizer.
    So an overflow in experts alone lowers only the experts' scale. Then the loss is
    multiplied by one number and experts' gradients are divided by another. The dense
    scale, which caused the overflow, never goes down (ChainedOptimizer.get_loss_scale
    and prepare_grads in core/optimizer/optimizer.py).

    The scale changes once all optimizers have reported whether they found an overflow,
    so that all divide a step's gradients by the same number.
    """
    scaler = dist_opts[0].grad_scaler
    if scaler is None:
        return
    overflows: list[bool] = []

    class SharedGradScaler(type(scaler)):  # type: ignore[misc]
        """A scaler of Megatron's that several optimizers share."""

        def begin(self) -> None:
            """A step begins; forget an earlier one that ended before the last
            optimizer's ``update``.
            """
            overflows.clear()

        def update(self, found_inf: bool) -> None:
            overflows.append(found_inf)
            if len(overflows) == len(dist_opts):
                super().update(any(overflows))
                overflows.clear()

    turn_into(scaler, SharedGradScaler)
    for dist_opt in dist_opts:
        dist_opt.grad_scaler = scaler


def count_once(parts: Sequence[Any], stage: Stage) -> None:
    """Correct the marks by which Megatron's norm counts a weight over TP ranks once. No
    communication.

    Megatron counts a gradient on every TP rank if its parameter is marked
    ``tensor_model_parallel``, else on the first one. Before core 0.17 Transformer
    Engine marks weights that are duplicated over TP (MLA's down projections). Their
    gradients then count once a rank. From 2.13 on it marks no grouped expert of cores
    before 0.19; Megatron marks no learnable softmax offset and, before core 0.16, no
    norm in a Mamba mixer. Their gradients then count on the first TP rank alone. The
    norm, and with it the clip, would depend on the topology. Main parameters have marks
    of their own, which only the norm and the count of zeros read, so correcting those
    changes nothing else.
    """
    weights = {route.weight.param: route.weight for route in parts[0].routes}
    for part in parts:
        for param, shard in () if part.is_stub_optimizer else owned_shards(part):
            counts = counts_here(weights[param], stage)
            if counts is not None:
                setattr(shard, _CUT_BY_TP, counts)


def counts_here(weight: Weight, stage: Stage) -> bool | None:
    """Whether this rank is the one to count what it holds; None where Megatron's mark
    is kept.
    """
    if not weight.is_expert:
        if stage.tp.size() == 1:
            return None
        if is_cut(weight):
            return True
        # other biases and norms are marked as they are
        return stage.tp.rank() == 0 if weight.param.dim() == 2 else None
    if stage.expert_tp is None or stage.expert_tp.size() == 1:
        return True  # EP spreads experts over TP ranks too: nobody else has this one
    if weight.is_module("GroupedMLP"):
        return True
    if weight.leaf not in ("linear_fc1", "linear_fc2"):
        return None
    replicated = weight.param.dim() != 2 and weight.leaf == "linear_fc2"
    return not replicated or stage.expert_tp.rank() == 0


def keep_biases_apart(routes: Sequence[Route], stage: Stage) -> None:
    """Unmark biases of experts that Megatron would add up over TP ranks. No
    communication.

    With sequence parallelism each TP rank has a part of the gradient of a bias behind a
    row-parallel layer, so Megatron marks the bias and adds the parts up. It marks
    biases of local experts as well (from core 0.15 on; before, experts have none). But
    with expert parallelism TP ranks hold different experts. Nothing else reads the mark
    of a parameter. Transformer Engine's grouped experts, gpt-oss's among them, are not
    marked.
    """
    for weight in (route.weight for route in routes if stage.sizes.ep > 1):
        if weight.is_expert and weight.name.endswith(".bias"):
            setattr(weight.param, _ADDED_UP, False)


def require_usable_groups(dist_opt: Any) -> None:
    """Refuse groups that the next step cannot use. It does not communicate.

    A rate may be a tensor with one element; one on a GPU is waited for, as in the step.

    Args:
        dist_opt: a MuonDistributedOptimizer that is no stub.

    Raises:
        ValueError: a rate or decay is no finite number, or no group has a parameter of
            Muon's.
    """
    groups = dist_opt.optimizer.param_groups
    largest = ("max_lr",) if dist_opt.muon.config.independent_decay else ()
    for number, group in enumerate(groups):
        for key in _READ + largest:
            if group["params"] and not _is_finite(group.get(key)):
                names = shard_names(dist_opt)
                members = [names[id(shard)] for shard in group["params"]]
                raise ValueError(
                    f"parameter group {number} ({first_names(members)}) has {key} "
                    f"{group.get(key)!r}, which is no finite number: set one before "
                    f"the step, as Megatron's scheduler does; {_UNCHANGED}"
                )
    there = {id(shard) for group in groups for shard in group["params"]}
    muons = dist_opt.muon.main_params.values()
    dropped = [shard for shard in muons if id(shard) not in there]
    if dropped:
        names = shard_names(dist_opt)
        missing = first_names([names[id(shard)] for shard in dropped], 5)
        raise ValueError(
            f"no parameter group has {missing} any more, which Muon "
            "updates: put them back, or freeze them by requires_grad_(False) before "
            f"the model's buffers are made; {_UNCHANGED}"
        )


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, Real)
    if isinstance(value, Tensor):
        is_number = value.numel() == 1
    return is_number and math.isfinite(value)


def shard_names(dist_opt: Any) -> dict[int, str]:
    """Names of parameters by the ids of their shards."""
    names = {route.weight.param: route.weight.name for route in dist_opt.routes}
    return {
        id(shard): expert_name(names[param], dist_opt.ep_rank, dist_opt.local_experts)
        for param, shard in owned_shards(dist_opt)
    }
