"""The clip after a step: reduce the largest logits, and scale what this rank has of the
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor
from torch.nn import Parameter

from megatron_muon.mcore.host.shards import owned_shards, states_of
from megatron_muon.mcore.qk_clip.attentions import Clip, WatchedAttention
from megatron_muon.mcore.qk_clip.factors import eta_of, row_factors
from megatron_muon.mcore.qk_clip.local import MAXIMA
from megatron_muon.mcore.qk_clip.row_scaling import scale_rows
from megatron_muon.runtime.collectives import Group, max_over
from megatron_muon.runtime.states import MAIN_KEY, States

# Largest logits have the dtype in which the attention computes them, and so has eta. A
# rank whose attention did not run in a step learns it from the others.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NOTHING = float("-inf")


# A rank's slice of a main parameter: its shard, and its first element's place in the
# parameter.
Main = tuple[States, Tensor, int]


@dataclass(slots=True)
class QkClip:
    """A rank's means to clip the logits of its attentions."""

    # the same on every rank of a stage but for TP slices
    attentions: tuple[WatchedAttention, ...]
    shards: dict[Parameter, Main]  # main parameters' slices
    group: Group  # the ranks of the pipeline stage in all optimizer instances
    tp: Group  # the ranks that share a weight
    device: torch.device  # the device that the group communicates from
    # what Megatron does after a step, where a weight is rounded from its clipped main
    # parameter
    following: tuple[Callable[[], None], ...]
    # the optimizer's step clips; else Megatron's training loop asks for it
    clips_in_step: bool
    largest: float = 0.0  # the stage's largest logit; 0.0 if all are below

    @torch.no_grad()
    def apply(self, *, only_watch: bool = False) -> None:
        """Find the largest logit since the last call, and clip what passed its
        threshold.

        Every rank of the stage calls it. With ``only_watch`` weights stay.
        """
        self.largest = 0.0
        if not self.attentions:
            return
        message = self.reduced()
        on_host = message.tolist()
        was_clipped = False
        for attention, place in self.places():
            setattr(attention.core, MAXIMA, None)
            dtype_number, *values = on_host[place]
            if dtype_number == _NOTHING:  # it ran on no rank
                continue
            self.largest = max(self.largest, max(values))
            clip = attention.clip
            if clip is None or only_watch:
                continue
            # a NaN beside it says nothing
            if any(value > clip.threshold for value in values):
                logits = message[place][1:].to(_DTYPES[int(dtype_number)])
                self._scale(attention, clip, logits)
                was_clipped = True
        for follow in self.following if was_clipped else ():
            follow()

    def reduced(self) -> Tensor:
        """For each attention the number of its dtype, then its heads' largest logits,
        in fp32.
        """
        size = sum(1 + attention.heads for attention in self.attentions)
        message = torch.full((size,), _NOTHING, device=self.device)
        for attention, place in self.places():
            maxima = getattr(attention.core, MAXIMA)
            if maxima is not None:
                numbers = message[place]
                numbers[0] = float(_DTYPES.index(maxima.dtype))
                of_tp_ranks = numbers[1:].view(self.tp.size(), -1)
                of_tp_ranks[self.tp.rank()] = maxima.detach().view(-1)
        max_over("muon/logits", message, self.group)
        return message

    def places(self) -> Iterator[tuple[WatchedAttention, slice]]:
        """Each attention with the place of its numbers in the message."""
        stop = 0
        for attention in self.attentions:
            start = stop
            stop += 1 + attention.heads
            yield attention, slice(start, stop)

    def _scale(self, attention: WatchedAttention, clip: Clip, largest: Tensor) -> None:
        for param, whole in attention.weights.items():
            eta = eta_of(largest, whole.groups, clip.threshold)
            factors = row_factors(eta, whole, clip.alpha)
            local = factors.view(self.tp.size(), -1)[self.tp.rank()]
            cols = param.shape[1:].numel()
            main = None
            if param in self.shards:
                states, shard, start = self.shards[param]
                # first, since the weight can be a half of it
                main = states.get(shard, MAIN_KEY)
            if not is_float8tensor(param):  # it is quantized anew
                scale_rows(param.data.view(-1), 0, cols, local)
            if main is not None:
                scale_rows(main, start, cols, local)
                # and its weight, where that is the shard
                states.put(shard, MAIN_KEY, main)


def shards_of(
    dist_opts: Sequence[Any], attentions: Sequence[WatchedAttention]
) -> dict[Parameter, Main]:
    """This rank's slices of the clipped weights' main parameters, by weight.

    An fp32 weight is its own main parameter, so it has none.
    """
    clipped = set(chain.from_iterable(attention.weights for attention in attentions))
    found: dict[Parameter, Main] = {}
    for part in dist_opts:
        if part.is_stub_optimizer:
            continue
        states = getattr(part, "states", None) or states_of(part)  # AdamW's
        for param, shard in owned_shards(part):
            if param in clipped and param.dtype != torch.float32:
                start = part._get_model_param_range_map(param)["param"].start
                found[param] = (states, shard, start)
    return found
