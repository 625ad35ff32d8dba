"""One home of a matrix that several share, alone: the others send zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from megatron_muon.orthogonalize.matmul import TORCH_DTYPE, numerics_on
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.orthogonalize.strips import orthogonalize_strips
from megatron_muon.planning.slices import Matrix
from megatron_muon.runtime import collectives
from megatron_muon.runtime.exchange.meter import Meter
from megatron_muon.runtime.exchange.sharers import Sharers
from megatron_muon.settings.config import MuonConfig


def step_of_home(
    home: int, strips: Sequence[Matrix], ranks: int, config: MuonConfig
) -> Callable[[], None]:
    """Newton-Schulz of the strips at ``home`` as ``runtime.round`` calls it."""
    own = [strip for strip in strips if strip.home == home]
    sharing = Sharers(strips, home, None, range(ranks), Meter())
    dtype = TORCH_DTYPE[Numerics(config).travels]
    held = [torch.randn(strip.rows, strip.cols).to(dtype) for strip in own]
    moves = torch.ones(len(own), dtype=torch.bool)

    def step() -> None:
        with mock.patch.object(collectives, "start_messages", _received_at_once):
            turned = sharing.turned(held) if own[0].is_turned else held
            orthogonalize_strips(
                turned, own[0].whole, moves, numerics_on(moves.device, config), sharing
            )
            if own[0].is_turned:
                sharing.turn_back(turned, held)

    return step


def _received_at_once(name: str, sent: torch.Tensor, route: Any) -> collectives.Pending | None:
    if not route.messages:
        return None
    received = sent.new_zeros(route.received)
    return collectives.Pending(name, route.group, sent, received, [])
