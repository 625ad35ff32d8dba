"""Sizes of the layers' outputs, by forward hooks that are there in a logging step only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_muon.mcore.watching.rows import PLACE, Table
from megatron_muon.mcore.watching.sums import StepSums

_OF = PLACE["layers"]


class LayerOutputs:
    """Sums of squares of the layers' outputs in training, over all microbatches of a step.

    Args:
        layers: name and module of each layer of this rank.
        table: the rows of the run.
    """

    def __init__(self, layers: Sequence[tuple[str, torch.nn.Module]], table: Table) -> None:
        self._layers = [(table.starts["layers", name], module) for name, module in layers]
        self._seen: list[tuple[int, Tensor, int]] = []
        self._hooks: list[Any] = []

    def attach(self) -> None:
        """Observe the next step's forward passes, and forget those before."""
        self._seen.clear()
        if not self._hooks:
            self._hooks = [
                module.register_forward_hook(self._hook(start)) for start, module in self._layers
            ]

    def detach(self) -> None:
        """Leave the model without a hook."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._seen.clear()

    def add_to(self, message: StepSums) -> None:
        """Add what was seen since ``attach``."""
        for start, norm, elements in self._seen:
            message.add(start + _OF["output_squares"], norm.double().square())
            message.add(start + _OF["elements"], float(elements))

    def _hook(self, start: int) -> Any:
        def see(module: torch.nn.Module, given: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if not module.training or not isinstance(hidden, Tensor) or _captures(hidden):
                return
            with torch.no_grad():
                norm = torch.linalg.vector_norm(hidden.detach(), dtype=torch.float32)
            self._seen.append((start, norm, hidden.numel()))

        return see


def _captures(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which no tensor of ours may be."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
