"""Transformer Engine's fused kernels as a virtual GPU has them: recorded, by its launch
rules.

Source: ``common/multi_tensor/multi_tensor_apply.cuh`` of Transformer Engine, whose
chunks and limits are those of torch's ``MultiTensorApply.cuh``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_muon.cpu import FusedAdam
from megatron_muon.runtime.patches import replaced
from support.virtual_gpu.device.gpu import Gpu
from support.virtual_gpu.device.launches import multi_tensor_launches
from support.virtual_gpu.device.tensors import CUDA


@contextmanager
def fused_kernels(gpu: Gpu) -> Iterator[None]:
    """Within it Megatron finds Transformer Engine's FusedAdam, norm and scaling, and
    nothing else of it.
    """
    optimizer = importlib.import_module("megatron.core.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    clip_grads = importlib.import_module("megatron.core.optimizer.clip_grads")
    flags = {
        "Adam": _adam_on(gpu),
        "USING_PYTORCH_OPTIMIZER": False,
        "HAVE_APEX_OR_TE": True,
        "USING_TE_OPTIMIZER": True,
        "USING_APEX_OPTIMIZER": False,
    }
    kernels = {
        "multi_tensor_applier": _apply,
        "l2_norm_impl": _l2_norm_on(gpu),
        "multi_tensor_scale_impl": _scale_on(gpu),
        "multi_tensor_scale_tensor_impl": _scale_on(gpu),  # since core 0.18
    }
    with ExitStack() as stack:
        for module, changes in (
            (optimizer, flags),
            (distributed, flags),
            (clip_grads, kernels),
        ):
            stack.enter_context(replaced(module, **changes))
        yield


def _adam_on(gpu: Gpu) -> type[FusedAdam]:
    class VirtualFusedAdam(FusedAdam):
        """Its state and groups are the base class's, its step is one kernel a group."""

        def step(self, closure: Callable[[], float] | None = None) -> None:
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                if not group["params"]:
                    continue
                every = [p for p in group["params"] if p.grad is not None]
                for param in every:
                    if not self.state[param]:
                        self.initialize_state(param, False)
                written = [
                    t for p in every for t in (p.detach(), *self.state[p].values())
                ]
                count = multi_tensor_launches([p.numel() for p in every], 4)
                gpu.launch(
                    "multi_tensor_adam",
                    [*(p.grad for p in every), *written],
                    written,
                    count,
                )

    return VirtualFusedAdam


def _apply(
    operation: Callable[..., Any], overflow: Tensor, lists: Any, *args: Any
) -> Any:
    return operation(lists, *args)


def _l2_norm_on(gpu: Gpu) -> Callable[..., Any]:
    def l2_norm(
        lists: Sequence[Sequence[Any]], per_tensor: bool
    ) -> tuple[Tensor, None]:
        (tensors,) = lists
        norm: Any = torch.empty(1, device=CUDA)
        partial = multi_tensor_launches([t.numel() for t in tensors], 1)
        gpu.launch("multi_tensor_l2norm", list(tensors), [norm], 1 + partial + 1)
        return norm, None

    return l2_norm


def _scale_on(gpu: Gpu) -> Callable[..., Any]:
    def scale(lists: Sequence[Sequence[Any]], factor: float | Tensor) -> None:
        sources, targets = lists
        reads = [*sources, *([factor] if isinstance(factor, Tensor) else [])]
        count = multi_tensor_launches([t.numel() for t in sources], 2)
        gpu.launch("multi_tensor_scale", reads, list(targets), count)

    return scale
