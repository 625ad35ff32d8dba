"""Megatron's optimizer over the tiny GPT of ``gpt``, by Megatron's own factory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from support import hybrid_on_cpu
from support.installed import VERSION
from support.runs.cases import matches

if TYPE_CHECKING:
    from support.models.gpt import Built


ON_HOST = ("optimizer_cpu_offload", True)  # among the settings of ``narrow``


def optimizer_config(built: Built) -> Any:
    """Megatron's settings of the case's optimizer."""
    from megatron.core.optimizer import OptimizerConfig

    case = built.case
    said_twice = {"overlap_param_gather": built.topology.overlap}
    if "overlap_param_gather" not in OptimizerConfig.__dataclass_fields__:
        said_twice = {}  # to DDP alone in older ones
    return OptimizerConfig(
        optimizer=case.optimizer,
        lr=case.lr,
        min_lr=0.0,
        weight_decay=case.weight_decay,
        clip_grad=case.clip,
        bf16=case.dtype == torch.bfloat16,
        fp16=case.dtype == torch.float16,
        initial_loss_scale=case.loss_scale,
        min_loss_scale=1.0,
        loss_scale_window=case.scale_window,
        hysteresis=1,
        params_dtype=case.dtype,
        use_distributed_optimizer=True,
        **({"fp8_recipe": case.fp8} if case.fp8 else {}),
        **({"reuse_grad_buf_for_mxfp8_param_ag": True} if case.fp8 == "mxfp8" else {}),
        **said_twice,
        **({} if case.narrow is None else _precision_aware(case)),
        overlap_param_gather_with_optimizer_step=built.topology.step_overlap,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=case.adam_eps,
    )


def _precision_aware(case: Any) -> dict[str, Any]:
    if ON_HOST in case.narrow:
        hybrid_on_cpu.install()
    grads = torch.float32 if case.fp32_grads else torch.bfloat16
    return {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": grads,
        **dict(case.narrow),
    }


def make_optimizer(built: Built) -> Any:
    """Megatron's optimizer over the model, by Megatron's own factory."""
    from megatron.core.optimizer import get_megatron_optimizer

    case, config = built.case, optimizer_config(built)
    fast = {id(p) for name, p in built.params.items() if matches(name, case.faster)}
    groups = _conditions(fast) if VERSION < (0, 16) else _overrides(config, fast)
    optimizer = get_megatron_optimizer(config, built.chunks, **groups)
    if VERSION < (0, 16):
        _halve_decay(optimizer)
    return optimizer


def _overrides(config: Any, fast: set[int]) -> dict[str, Any]:
    """Three times the rate and half the decay for some, as core 0.16 and later are
    told.
    """
    from megatron.core.optimizer import get_standard_config_overrides
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    overrides = get_standard_config_overrides(config)
    if fast:
        faster = ParamPredicate(name="faster", fn=lambda p: id(p) in fast)
        decayed = ParamPredicate(
            name="decayed", fn=lambda p: id(p) in fast and p.dim() > 1
        )
        overrides[ParamKey(predicate=faster)] = {"max_lr": 3 * config.lr}
        overrides[ParamKey(predicate=decayed)] = {"wd_mult": 0.5}
    return {"config_overrides": overrides}


def _conditions(fast: set[int]) -> dict[str, Any]:
    """As earlier ones are told, which have no other decay than all and none."""
    if not fast:
        return {}
    return {"scale_lr_cond": lambda name, param: id(param) in fast, "lr_mult": 3.0}


def _halve_decay(optimizer: Any) -> None:
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            if group["lr_mult"] == 3.0 and group["wd_mult"] == 1.0:
                group["wd_mult"] = 0.5


def distributed_optimizers(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each for each in chained if not each.is_stub_optimizer]


def inner_optimizers(optimizer: Any) -> list[Any]:
    return [each.optimizer for each in distributed_optimizers(optimizer)]
