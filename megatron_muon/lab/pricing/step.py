"""The optimizer's step on stated hardware: every rank and every round of the plans that it runs.

The order is that of ``DistributedMuon.step``. The momentum and the gather of round k + 1 start
before round k is orthogonalized; the scatter of round k - 1 is finished after it. AdamW's part runs
while the first round travels. A stage with experts runs the step of its dense parameters, then that
of its experts, whose first round is orthogonalized while the last dense directions travel.

Only the optimizers' steps count. The reduction of gradients, their norm and clipping, and the
all-gather of updated parameters are the same for AdamW and Muon, and do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.kernels import (
    Cost,
    batches,
    foreach,
    newton_schulz,
    newton_schulz_strip,
    stream,
    turns,
)
from megatron_muon.lab.pricing.streams import WAITING, Streams
from megatron_muon.lab.pricing.work import (
    RoundWork,
    Shared,
    held_elements,
    rounds_of,
    total,
)
from megatron_muon.orthogonalize.iteration import is_tight
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.grid import neighbours_of
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.rounds.cut import ELEMENTS_AT_ONCE, scratch_limit
from megatron_muon.settings.config import MuonConfig

MOMENTUM, ADAMW, STAGING = "momentum", "adamw", "staging"
NEWTON_SCHULZ, UPDATE = "newton_schulz", "update"
PHASES = (ADAMW, MOMENTUM, STAGING, NEWTON_SCHULZ, UPDATE, WAITING)

# Bytes per element that elementwise operations read and write, without the message's own. With
# fused kernels, momentum reads M and G and writes M; the update reads and writes W. Beside the
# kernel, flags are zeroed and put into the message, and the update's factors go to the device.
_FUSED_MOMENTUM = 8 + 4, 3  # bytes, launches
_FUSED_UPDATE = 8, 2
# With torch's operations on lists, momentum with Nesterov is μM, + G, a copy times μ, + G, and the
# cast into the message; then one read of G for its norm. The update is the direction to fp32, times
# its scale, the decay, the difference. AdamW is one fused kernel, which reads W, G and both moments
# and writes all but G.
_MOMENTUM = {True: (8 + 12 + 8 + 12, 4), False: (8 + 12, 2)}  # bytes, operations without the cast
_NORM, _FLAGS = 4, 4  # bytes; kernels that find out which matrix has a gradient
_UPDATE = 8 + 8 + 12, 3  # bytes, operations without the cast
_ADAMW = 16 + 12


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One DistributedOptimizer of a stage.

    Attributes:
        plan: the plan of its Muon parameters.
        rest: by rank, elements that AdamW updates.
    """

    plan: ExchangePlan
    rest: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.rest) != self.plan.size:
            raise ValueError(f"{len(self.rest)} ranks' elements for {self.plan.size} ranks")


@dataclass(frozen=True, slots=True)
class StepTime:
    """The times of a step, in seconds.

    Attributes:
        seconds: time until the last rank has ended the step.
        rounds: number of rounds of each optimizer.
        updated: for each optimizer the time at which AdamW's part, and then each round, has updated
            its parameters on every rank.
        launches: number of launches on the rank that has most.
        newton_schulz_mean, newton_schulz_busiest: time of Newton-Schulz, mean and most over ranks.
        exposed_mean, exposed_most: time that the compute stream waits for messages, and so for
            later ranks; mean and most over ranks.
        hidden_mean: time that messages take while the compute stream does not wait; mean over
            ranks.
        host: time until the last rank's host has launched everything.
        phases: by name, time on the compute stream of the rank that has most of the phase.
        by_rank: time at which each rank has ended its step.
    """

    seconds: float
    rounds: tuple[int, ...]
    updated: tuple[tuple[float, ...], ...]
    launches: int
    newton_schulz_mean: float
    newton_schulz_busiest: float
    exposed_mean: float
    exposed_most: float
    hidden_mean: float
    host: float
    phases: dict[str, float]
    by_rank: tuple[float, ...]


def price_step(
    optimizers: Sequence[Optimizer],
    config: MuonConfig,
    hardware: Hardware,
    *,
    device: Device = "cuda",
    experts_early: bool = True,
    nodes: Sequence[int] | None = None,
) -> StepTime:
    """The times of a stage's Muon step, AdamW's part included.

    Args:
        optimizers: the dense one, then that of experts, in the order of their steps; all have the
            same number of ranks.
        config: the settings of the run that made the plans.
        hardware: the hardware of every rank.
        device: kind of the hardware. On CUDA momentum and update are the fused kernels, as if
            triton were installed, unless ``config.elementwise`` is ``foreach``.
        experts_early: whether an optimizer orthogonalizes its first round before the one before it
            waits for its last scatter.
        nodes: the node of each rank, see ``streams.nodes_of``.
    """
    numerics, size = Numerics(config, device), stage_size(optimizers)
    streams = Streams(hardware, size, nodes)
    pending = None
    every = [_Steps(optimizer, numerics, streams) for optimizer in optimizers]
    for each in every:
        steps = each.run(begun=pending is not None)
        if pending is not None and not experts_early:
            _finish(pending)
        next(steps)  # the first round's directions are made
        if pending is not None and experts_early:
            _finish(pending)
        next(steps)  # only the last round's directions are still on their way
        pending = steps
    if pending is not None:
        _finish(pending)
    rounds = tuple(len(optimizer.plan.rounds) for optimizer in optimizers)
    return result_of(streams, rounds, tuple(tuple(each.updated) for each in every))


def price_adamw(optimizers: Sequence[Optimizer], hardware: Hardware) -> float:
    """Seconds of AdamW's step where all parameters of the stage are its own."""
    streams = Streams(hardware, stage_size(optimizers))
    for optimizer in optimizers:
        elements = total([held_elements(optimizer.plan), optimizer.rest])
        streams.run(ADAMW, partial(adamw_of, hardware, elements))
    return max(streams.ends)


def adamw_of(hardware: Hardware, elements: Sequence[int], rank: int) -> Cost:
    """``adamw`` of a rank's elements."""
    return adamw(hardware, elements[rank])


def adamw(hardware: Hardware, elements: int) -> Cost:
    """The cost of a fused AdamW over a rank's elements."""
    return foreach(hardware, elements, 1, _ADAMW)


def fused_momentum(hardware: Hardware, held: Sequence[int], itemsize: int, rank: int) -> Cost:
    """The cost of momentum over a rank's elements in one kernel, with what is beside it."""
    nbytes, launches = _FUSED_MOMENTUM
    return _in_one(hardware, held[rank], itemsize, nbytes - _narrower(hardware, 2), launches)


def fused_update(hardware: Hardware, held: Sequence[int], itemsize: int, rank: int) -> Cost:
    """The cost of the update of a rank's elements in one kernel, with what is beside it."""
    return _in_one(hardware, held[rank], itemsize, *_FUSED_UPDATE)


def _narrower(hardware: Hardware, passes: int) -> int:
    """Bytes per element by which reads and writes of the momentum fall short of fp32's."""
    return passes * (4 - hardware.momentum_bytes)


def _in_one(hardware: Hardware, elements: int, itemsize: int, nbytes: int, launches: int) -> Cost:
    if not elements:
        return Cost()
    return stream(hardware, elements * (nbytes + itemsize), launches)


class _Steps:
    """One optimizer's step on all ranks. ``run`` yields twice, where another one's work may run.

    ``updated`` has the times of ``StepTime``.
    """

    def __init__(self, optimizer: Optimizer, numerics: Numerics, streams: Streams) -> None:
        self._optimizer, self._numerics, self._streams = optimizer, numerics, streams
        self._hardware, self._config = streams.hardware, numerics.config
        # Homes are neighbours in the stage, of which a node may have fewer than it has GPUs.
        self._sharing = replace(self._hardware, gpus_per_node=neighbours_of(streams.nodes))
        self._rounds = rounds_of(optimizer.plan)
        self._scratch = scratch_limit(optimizer.plan.matrices)
        self._fused = numerics.on_gpu and self._config.elementwise == "auto"
        self._adamw = partial(adamw_of, self._hardware, optimizer.rest)
        self.updated: list[float] = []

    def run(self, *, begun: bool) -> Iterator[None]:
        """All of it, in the order of a rank's step.

        Args:
            begun: another optimizer begins it, so that AdamW's part comes after the first round.
        """
        streams = self._streams
        gathering = self._start_gather(0)
        if not begun:
            self._step_adamw()
        if not self._rounds:
            yield
            if begun:
                self._step_adamw()
        scattering: dict[int, float] = {}
        for number, work in enumerate(self._rounds):
            streams.wait(gathering)
            streams.run(STAGING, partial(self._received, work))
            gathering = self._start_gather(number + 1)
            streams.run(NEWTON_SCHULZ, partial(self._orthogonalized, work))
            if number:
                self._finish_round(number - 1, scattering)
            else:
                yield
                if begun:
                    self._step_adamw()
            streams.run(STAGING, partial(self._staged, work))
            scattering = streams.exchange(work.scatter)
        yield
        if self._rounds:
            self._finish_round(len(self._rounds) - 1, scattering)

    def _step_adamw(self) -> None:
        self._streams.run(ADAMW, self._adamw)
        self.updated.append(max(self._streams.compute))

    def _start_gather(self, number: int) -> dict[int, float]:
        if number >= len(self._rounds):
            return {}
        work = self._rounds[number]
        self._streams.run(MOMENTUM, partial(self._momentum, work))
        return self._streams.exchange(work.gather)

    def _finish_round(self, number: int, scattering: dict[int, float]) -> None:
        work = self._rounds[number]
        self._streams.wait(scattering)
        self._streams.run(UPDATE, partial(self._updated, work))
        self.updated.append(max(self._streams.compute))

    def _momentum(self, work: RoundWork, rank: int) -> Cost:
        elements, pieces = work.held[rank], work.pieces[rank]
        if not elements:
            return Cost()
        if self._fused:
            return fused_momentum(self._hardware, work.held, self._itemsize, rank)
        nbytes, operations = _MOMENTUM[self._config.nesterov]
        nbytes -= _narrower(self._hardware, 5 if self._config.nesterov else 4)
        cost = self._in_chunks(elements, pieces, nbytes + 4 + self._itemsize, operations + 1)
        return (
            cost
            + foreach(self._hardware, elements, pieces, _NORM)
            + stream(self._hardware, 0, _FLAGS)
        )

    def _updated(self, work: RoundWork, rank: int) -> Cost:
        if self._fused:
            return fused_update(self._hardware, work.held, self._itemsize, rank)
        nbytes, operations = _UPDATE
        more = nbytes + 4 + self._itemsize, operations + 1
        return self._in_chunks(work.held[rank], work.pieces[rank], *more)

    def _in_chunks(self, elements: int, tensors: int, nbytes: float, operations: int) -> Cost:
        """The cost of foreach operations over chunks of equal sizes."""
        if not elements:
            return Cost()
        chunks = -(-elements // ELEMENTS_AT_ONCE)
        each = -(-tensors // chunks)
        cost = foreach(self._hardware, -(-elements // chunks), each, 0, operations)
        moved = elements * nbytes / self._hardware.memory
        return cost.times(chunks) + Cost(moved, 0)

    def _received(self, work: RoundWork, rank: int) -> Cost:
        elements, tensors = work.arriving[rank], work.arrivals[rank]
        return self._copied(work, rank, elements, tensors)

    def _staged(self, work: RoundWork, rank: int) -> Cost:
        elements, tensors = work.leaving[rank], work.departures[rank]
        return self._copied(work, rank, elements, tensors)

    def _copied(self, work: RoundWork, rank: int, elements: int, tensors: int) -> Cost:
        """The cost of a copy of what travels, and of what is kept if it does not stay in place."""
        if elements and not work.in_place(rank):
            elements, tensors = elements + work.kept[rank], tensors + work.keeps[rank]
        return foreach(self._hardware, elements, tensors, 2 * self._itemsize)

    def _orthogonalized(self, work: RoundWork, rank: int) -> Cost:
        cost = Cost()
        for layout, count in work.layouts[rank].items():
            if layout.shared is not None:
                cost += self._strip(layout.shared, layout.rows * layout.cols).times(count)
                continue
            rows, cols, *_ = layout
            for matrices, times in batches(
                rows,
                cols,
                count,
                ns_batch=self._config.ns_batch if self._numerics.on_gpu else 1,
                scratch=self._scratch,
            ):
                one = newton_schulz(
                    self._hardware,
                    rows,
                    cols,
                    matrices,
                    self._numerics,
                    is_tight=is_tight(rows * cols, work.staged(rank)),
                )
                cost += one.times(times)
        return cost

    def _strip(self, shared: Shared, elements: int) -> Cost:
        homes, hardware = min(shared.strips, self._optimizer.plan.size), self._sharing
        cost = newton_schulz_strip(
            hardware, shared.whole, shared.long, shared.strips, homes, self._numerics
        )
        if shared.is_turned:
            moved = shared.whole[0] * shared.long + elements  # its columns, and its rows back
            cost += turns(hardware, moved * self._itemsize, homes)
        return cost

    @property
    def _itemsize(self) -> int:
        return self._optimizer.plan.itemsize


def result_of(
    streams: Streams, rounds: tuple[int, ...], updated: tuple[tuple[float, ...], ...] = ()
) -> StepTime:
    """The times of a step that has run on some streams, with its numbers of rounds."""
    ends, idle = streams.ends, [0.0] * len(streams.host)
    work, waited = streams.spent.get(NEWTON_SCHULZ, idle), streams.spent.get(WAITING, idle)
    return StepTime(
        seconds=max(ends),
        rounds=rounds,
        updated=updated,
        launches=max(streams.launches),
        newton_schulz_mean=sum(work) / len(work),
        newton_schulz_busiest=max(work),
        exposed_mean=sum(waited) / len(waited),
        exposed_most=max(waited),
        hidden_mean=sum(
            max(0.0, sent - wait) for sent, wait in zip(streams.travelling, waited, strict=True)
        )
        / len(waited),
        host=max(streams.host),
        phases={name: max(streams.spent.get(name, idle)) for name in PHASES},
        by_rank=tuple(ends),
    )


def _finish(steps: Iterator[None]) -> None:
    for _ in steps:
        raise AssertionError("a step stops twice")


def stage_size(optimizers: Sequence[Optimizer]) -> int:
    """The number of ranks of the stage that these optimizers share."""
    sizes = {optimizer.plan.size for optimizer in optimizers}
    if len(sizes) != 1:
        raise ValueError(f"a stage's optimizers have its ranks, got {sorted(sizes)}")
    return sizes.pop()
