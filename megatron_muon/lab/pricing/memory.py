"""Memory of each rank: at rest, and above that at the highest moment of Muon's step on
a GPU.

Above the state there are buffers of the exchange, and scratch memory (``scratch``).
Sizes and lifetimes are those of ``runtime.round`` and ``runtime.exchange``. Left out
are tensors of one number per matrix or segment, and the allocator's rounding. A GPU's
fused AdamW takes none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_muon.lab.pricing import scratch, sums
from megatron_muon.lab.pricing.work import (
    WIDE,
    Optimizer,
    Pairs,
    RoundWork,
    StateBytes,
    rounds_of,
)
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.schedule import Action, Event, step_events
from megatron_muon.settings.config import MuonConfig

MOMENTUM, MOMENTS, MAIN = "Muon's momentum", "AdamW's moments", "main parameters"
PARAMETERS, GRADIENTS = "parameters", "gradients"
KINDS = (PARAMETERS, GRADIENTS, MAIN, MOMENTUM, MOMENTS)
_FP32 = 4


def at_rest(
    optimizers: Sequence[Optimizer], *, with_muon: bool = True, host: bool = False
) -> list[dict[str, int]]:
    """Bytes by kind, of each rank of a stage with these optimizers; or with AdamW's
    alone.

    They are those on the device, or with ``host`` the others.
    """
    ranks = [dict.fromkeys(KINDS, 0) for _ in range(optimizers[0].plan.size)]
    for one in optimizers:
        held = one.held
        wide, both = held.of_adamw
        part = held.on_host if host else 1 - held.on_host
        for kinds, muon, elements, lines in zip(
            ranks, one.muon, one.elements, one.lines, strict=True
        ):
            muons = muon * with_muon
            adamws = elements - muons
            main = int(part * (muons * held.main + adamws * wide))
            kinds[MAIN] += main * one.has_main
            kinds[MOMENTUM] += int(part * muons * held.momentum)
            kinds[MOMENTS] += int(part * adamws * both)
            if not host:
                kinds[PARAMETERS] += one.parameters
                kinds[GRADIENTS] += one.gradients
                kinds[MOMENTUM] += held.of_rule * lines * with_muon
    return ranks


def peaks(
    plans: Sequence[ExchangePlan],
    config: MuonConfig,
    device: Device = "cuda",
    held: StateBytes = WIDE,
) -> list[int]:
    """Bytes of each rank above the state at the highest moment of its step.

    Args:
        plans: of the stage's optimizers, in the order of their steps.
        config: the settings that made them.
        device: kind of device of all ranks.
        held: bytes of state; a round works on fp32 copies of its shards where they are
            fewer. Of state on the host, that of two rounds is on the device at most.
    """
    numerics = Numerics(config, device)
    sized = [_sized(plan, numerics, held) for plan in plans]
    each = (held.first + held.main) * (held.on_host > 0)
    elements = [work.held for plan in plans for work in rounds_of(plan)]
    here = [each * sum(sorted(works)[-2:]) for works in zip(*elements, strict=True)]
    events = list(step_events([len(plan.rounds) for plan in plans]))
    found = []
    for rank in range(plans[0].size if plans else 0):
        of_rank = [[sizes[rank] for sizes in rounds] for rounds in sized]
        found.append(_peak(of_rank, events) + here[rank])
    return found


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of a rank's buffers in a round."""

    numbers: int  # scratch memory of what a rule adds up before all else
    travels: bool  # whether the rank sends or receives messages in the round
    kept: int  # pieces that are home already
    staged: int  # the matrices that are orthogonalized here
    in_place: bool  # what is kept lies in the staged buffer from the beginning
    sent: int  # sent, received: messages of the gather
    received: int
    out: int  # out, back: messages of the scatter
    back: int
    scratch: int  # of Newton-Schulz
    # momentum, update: scratch memory of the elementwise work before and after it
    momentum: int
    update: int


def _sized(
    plan: ExchangePlan, numerics: Numerics, held: StateBytes
) -> list[list[_Sizes]]:
    """``[round][rank]``."""
    works = rounds_of(plan)
    of_newton_schulz = scratch.of_newton_schulz(plan, works, numerics)
    packing = scratch.of_packing(plan, numerics)
    return [
        _of_round(work, plan, numerics, held, scratches, packs)
        for work, scratches, packs in zip(works, of_newton_schulz, packing, strict=True)
    ]


def _of_round(
    work: RoundWork,
    plan: ExchangePlan,
    numerics: Numerics,
    held: StateBytes,
    scratches: list[int],
    packs: list[int],
) -> list[_Sizes]:
    sent, received = _ends(work.gather, plan.size)
    out, back = _ends(work.scatter, plan.size)
    return [
        _Sizes(
            numbers=sums.scratch("gather", work.slices[rank], numerics),
            travels=sums.asks(numerics)
            or any((sent[rank], received[rank], out[rank], back[rank])),
            kept=(kept := sum(work.kept[rank]) * plan.itemsize),
            staged=kept + sum(work.arriving[rank]) * plan.itemsize,
            in_place=work.in_place(rank),
            sent=sent[rank],
            received=received[rank],
            out=out[rank],
            back=back[rank],
            scratch=scratches[rank],
            momentum=scratch.of_momentum((kept + sent[rank]) // plan.itemsize, numerics)
            + elements * _FP32 * (held.momentum < _FP32)
            + packs[rank],
            update=(
                sums.scratch("scatter", work.slices[rank], numerics)
                or scratch.of_update(elements, numerics)
            )
            + elements * _FP32 * (held.main < _FP32),
        )
        for rank, elements in enumerate(work.held)
    ]


def _ends(pairs: Pairs, size: int) -> tuple[list[int], list[int]]:
    """Bytes that each rank sends, and that it receives."""
    sent, received = [0] * size, [0] * size
    for (sender, receiver), nbytes in pairs.items():
        sent[sender] += nbytes
        received[receiver] += nbytes
    return sent, received


class _Live:
    """Bytes in use, and most of them so far."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)

    def free(self, nbytes: int) -> None:
        self.now -= nbytes

    def pass_through(self, nbytes: int) -> None:
        """Take and free."""
        self.take(nbytes)
        self.free(nbytes)


def _peak(optimizers: Sequence[Sequence[_Sizes]], events: Sequence[Event]) -> int:
    """The most bytes of a rank in use after any event of its step."""
    live = _Live()
    for event in events:
        if event.action != "adamw":
            sizes = optimizers[event.optimizer][event.round]
            if event.is_for(sizes.travels):
                _BUFFERS[event.action](sizes, live)
    return live.most


def _start(sizes: _Sizes, live: _Live) -> None:
    live.pass_through(sizes.numbers)
    live.take((sizes.staged if sizes.in_place else sizes.kept) + sizes.sent)
    live.pass_through(sizes.momentum)
    live.take(sizes.received)


def _assemble(sizes: _Sizes, live: _Live) -> None:
    live.free(sizes.sent)
    if sizes.in_place:
        live.free(sizes.received)
    elif sizes.received:
        live.take(sizes.staged)
        live.free(sizes.kept + sizes.received)


def _scatter(sizes: _Sizes, live: _Live) -> None:
    if sizes.in_place:
        live.take(sizes.out)
    elif sizes.out:
        live.take(sizes.kept + sizes.out)
        live.free(sizes.staged)
    live.take(sizes.back)


def _update(sizes: _Sizes, live: _Live) -> None:
    live.free(sizes.out)
    live.pass_through(sizes.update)
    live.free((sizes.staged if sizes.in_place else sizes.kept) + sizes.back)


def _orthogonalize(sizes: _Sizes, live: _Live) -> None:
    live.pass_through(sizes.scratch)


# What each event takes and frees.
_BUFFERS: Mapping[Action, Callable[[_Sizes, _Live], None]] = {
    "start": _start,
    "assemble": _assemble,
    "orthogonalize": _orthogonalize,
    "scatter": _scatter,
    "update": _update,
}
