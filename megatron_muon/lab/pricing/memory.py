"""Memory of each rank: at rest, and above that at the highest moment of Muon's step.

Above the state there are buffers of the exchange, and scratch memory (``scratch``). Sizes and
lifetimes are those of ``runtime.round`` and ``runtime.exchange``. Left out are tensors of one
number per matrix or segment, and the allocator's rounding. AdamW's scratch memory is that of the
caller: a GPU's fused kernel has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_muon.lab.pricing import scratch
from megatron_muon.lab.pricing.work import Pairs, RoundWork, rounds_of
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.settings.config import MuonConfig

MOMENTUM, MOMENTS, MAIN = "Muon's momentum", "AdamW's moments", "main parameters"
PARAMETERS, GRADIENTS = "parameters", "gradients"
_FP32 = 4


@dataclass(frozen=True, slots=True)
class Buffers:
    """Megatron's buffers of one DistributedOptimizer on a rank; the same on every rank of a stage.

    Attributes:
        parameters, gradients: bytes of all elements, padding included.
        has_main: whether main parameters in fp32 are beside the parameters.
    """

    parameters: int
    gradients: int
    has_main: bool


def at_rest(
    buffers: Sequence[Buffers],
    muon: Sequence[Sequence[int]],
    rest: Sequence[Sequence[int]],
    momentum_bytes: int = _FP32,
) -> list[dict[str, int]]:
    """Bytes by kind, of each rank.

    Args:
        buffers: of each optimizer.
        muon: for each optimizer, by rank, elements that have a momentum.
        rest: for each optimizer, by rank, elements that have AdamW's two moments.
        momentum_bytes: of an element of momentum.
    """
    whole = {
        PARAMETERS: sum(one.parameters for one in buffers),
        GRADIENTS: sum(one.gradients for one in buffers),
    }
    kinds = []
    for rank in range(len(muon[0])):
        main = sum(
            (mine[rank] + others[rank]) * _FP32 * one.has_main
            for one, mine, others in zip(buffers, muon, rest, strict=True)
        )
        momentum = sum(mine[rank] for mine in muon) * momentum_bytes
        moments = sum(others[rank] for others in rest) * 2 * _FP32
        kinds.append({**whole, MAIN: main, MOMENTUM: momentum, MOMENTS: moments})
    return kinds


def peaks(
    plans: Sequence[ExchangePlan],
    config: MuonConfig,
    device: Device = "cuda",
    adamw: Sequence[Sequence[int]] = (),
) -> list[int]:
    """Bytes of each rank above the state at the highest moment of its step.

    Args:
        plans: of the stage's optimizers, in the order of their steps.
        config: the settings that made them.
        device: kind of device of all ranks.
        adamw: for each plan, by rank, bytes of scratch memory in which AdamW updates the other
            parameters; empty where its kernel has none.
    """
    if not plans:
        return []
    numerics = Numerics(config, device)
    rounds = [_sized(plan, numerics) for plan in plans]
    adamw = adamw or [[0] * plan.size for plan in plans]
    return [
        _peak(
            [[sizes[rank] for sizes in one] for one in rounds],
            [of_rank[rank] for of_rank in adamw],
        )
        for rank in range(plans[0].size)
    ]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of a rank's buffers in a round.

    Attributes:
        kept: pieces that are home already.
        staged: the matrices that are orthogonalized here.
        in_place: what is kept lies in the staged buffer from the beginning.
        sent, received: messages of the gather.
        out, back: messages of the scatter.
        scratch: of Newton-Schulz.
        momentum, update: scratch memory of the elementwise work before and after it.
    """

    kept: int = 0
    staged: int = 0
    in_place: bool = True
    sent: int = 0
    received: int = 0
    out: int = 0
    back: int = 0
    scratch: int = 0
    momentum: int = 0
    update: int = 0

    @property
    def travels(self) -> bool:
        return bool(self.sent or self.received or self.out or self.back)


def _sized(plan: ExchangePlan, numerics: Numerics) -> list[list[_Sizes]]:
    """``[round][rank]``."""
    works = rounds_of(plan)
    of_newton_schulz = scratch.of_newton_schulz(plan, works, numerics)
    return [
        _of_round(work, plan, numerics, scratches)
        for work, scratches in zip(works, of_newton_schulz, strict=True)
    ]


def _of_round(
    work: RoundWork, plan: ExchangePlan, numerics: Numerics, scratches: list[int]
) -> list[_Sizes]:
    sent, received = _ends(work.gather, plan.size)
    out, back = _ends(work.scatter, plan.size)
    return [
        _Sizes(
            kept=(kept := work.kept[rank] * plan.itemsize),
            staged=kept + work.arriving[rank] * plan.itemsize,
            in_place=work.in_place(rank),
            sent=sent[rank],
            received=received[rank],
            out=out[rank],
            back=back[rank],
            scratch=scratches[rank],
            momentum=scratch.of_momentum((kept + sent[rank]) // plan.itemsize, numerics),
            update=scratch.of_update(work.held[rank], numerics),
        )
        for rank in range(plan.size)
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


def _peak(optimizers: Sequence[Sequence[_Sizes]], adamw: Sequence[int]) -> int:
    """The order is that of ``DistributedMuon.step``, where experts begin before the end.

    Args:
        optimizers: rounds of each.
        adamw: scratch memory of each one's AdamW.
    """
    live = _Live()
    last: _Sizes | None = None
    for number, (rounds, of_adamw) in enumerate(zip(optimizers, adamw, strict=True)):
        _begin(rounds, live)
        if not number:  # others have orthogonalized their first round before
            live.pass_through(of_adamw)
        _run(rounds, live, last, of_adamw if number else 0)
        last = rounds[-1] if rounds and rounds[-1].travels else None
    if last is not None:
        _finish(last, live)
    return live.most


def _begin(rounds: Sequence[_Sizes], live: _Live) -> None:
    if rounds and rounds[0].travels:
        _start(rounds[0], live)


def _run(rounds: Sequence[_Sizes], live: _Live, last: _Sizes | None, adamw: int) -> None:
    """All rounds of an optimizer; after its first, the one before it finishes its ``last``."""
    if not rounds:
        if last is not None:
            _finish(last, live)
        live.pass_through(adamw)
    for number, sizes in enumerate(rounds):
        if not sizes.travels:
            _start(sizes, live)
        _assemble(sizes, live)
        _begin(rounds[number + 1 : number + 2], live)
        live.pass_through(sizes.scratch)
        if number and rounds[number - 1].travels:
            _finish(rounds[number - 1], live)
        if not number:
            if last is not None:
                _finish(last, live)
            live.pass_through(adamw)
        _leave(sizes, live)
        if not sizes.travels:
            _finish(sizes, live)


def _start(sizes: _Sizes, live: _Live) -> None:
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


def _leave(sizes: _Sizes, live: _Live) -> None:
    if sizes.in_place:
        live.take(sizes.out)
    elif sizes.out:
        live.take(sizes.kept + sizes.out)
        live.free(sizes.staged)
    live.take(sizes.back)


def _finish(sizes: _Sizes, live: _Live) -> None:
    live.free(sizes.out)
    live.pass_through(sizes.update)
    live.free((sizes.staged if sizes.in_place else sizes.kept) + sizes.back)
