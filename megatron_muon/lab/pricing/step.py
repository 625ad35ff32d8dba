"""The optimizer's step on stated hardware: every rank and every round of the plans that
it runs.

The order is ``planning.schedule``'s: the dense parameters' step, then the experts'.

Only the optimizers' steps count. The reduction of gradients, their norm and clipping,
and the all-gather of updated parameters are the same for AdamW and Muon, and do not
count. ``around`` and ``host_python`` price what else Megatron's step has, without the
gather.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_muon.lab.pricing import sums
from megatron_muon.lab.pricing.hardware import MICRO, Hardware
from megatron_muon.lab.pricing.kernels import (
    Cost,
    batches,
    foreach,
    is_fused,
    newton_schulz,
    stream,
)
from megatron_muon.lab.pricing.streams import WAITING, Streams
from megatron_muon.lab.pricing.strips import newton_schulz_strip, rows_for_columns
from megatron_muon.lab.pricing.work import (
    WIDE,
    Optimizer,
    RoundWork,
    Shared,
    Slices,
    rounds_of,
    total,
)
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.grid import neighbours_of
from megatron_muon.planning.rounds.cut import scratch_limit
from megatron_muon.planning.schedule import Event, step_events
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.rules import row_of

MOMENTUM, ADAMW, STAGING = "momentum", "adamw", "staging"
NEWTON_SCHULZ, UPDATE = "newton_schulz", "update"
PHASES = (ADAMW, MOMENTUM, STAGING, NEWTON_SCHULZ, UPDATE, WAITING)

# Bytes per element that elementwise operations read and write, without the message's
# own. With fused kernels, momentum reads M and G and writes M; the update reads and
# writes W. Beside the kernel, flags are zeroed and put into the message, and the
# update's factors go to the device.
_FUSED_MOMENTUM = 8 + 4, 3  # bytes, launches
_FUSED_UPDATE = 8, 2
# With torch's operations on lists, momentum with Nesterov is μM, + G, a copy times μ, +
# G, and the cast into the message; then one read of G for its norm. The update is the
# direction to fp32, times its scale, the decay, the difference. AdamW is one fused
# kernel, which reads W, G and both moments and writes all but G.
# bytes, operations
_MOMENTUM = {True: (8 + 12 + 8 + 12 + 4, 5), False: (8 + 12 + 4, 3)}
_NORM, _FLAGS = 4, 4  # bytes; kernels that find out which matrix has a gradient
# A momentum in blocks is made wide and put back (``rules.int8_momentum``).
# bytes, launches
_PACKED = (5 + 8 + 4 + 12) + (8 + 4 + 8 + 8 + 5), 4 + 10
_UPDATE = 8 + 8 + 12 + 4, 4  # bytes, operations
_ADAMW = 16 + 12
# Bytes of an element around the step, by Transformer Engine's kernels and torch's copy.
AROUND = {"norm": 4, "clip": 4 + 4, "copy": 4 + 2}
# Launches for an update of exact norm: that of the norm, its square, a comparison, a
# quotient, a choice, a root, a cast, and that of the product.
_TO_NORM = 8
_TO_MOMENTS = 26  # of each unit with second moments at its home: test_pricing_counts


@dataclass(frozen=True, slots=True)
class StepTime:
    """The times of a step, in seconds."""

    seconds: float  # time until the last rank has ended the step
    rounds: tuple[int, ...]  # number of rounds of each optimizer
    launches: int  # number of launches on the rank that has most
    newton_schulz_busiest: float  # time of Newton-Schulz, on the rank that has most
    # exposed_mean, exposed_most: time that the compute stream waits for messages, and
    # so for later ranks; mean and most over ranks
    exposed_mean: float
    exposed_most: float
    # time that messages take while the compute stream does not wait; mean over ranks
    hidden_mean: float
    host: float  # time until the last rank's host has launched everything
    # by name, time on the compute stream of the rank that has most of the phase
    phases: dict[str, float]
    by_rank: tuple[float, ...]  # time at which each rank has ended its step


def price_step(
    optimizers: Sequence[Optimizer],
    config: MuonConfig,
    hardware: Hardware,
    *,
    device: Device = "cuda",
    nodes: Sequence[int] | None = None,
) -> StepTime:
    """The times of a stage's Muon step, AdamW's part included.

    Args:
        optimizers: the dense one, then that of experts, in the order of their steps;
            all have the same number of ranks.
        config: the settings of the run that made the plans.
        hardware: the hardware of every rank.
        device: kind of the hardware. On CUDA momentum and update are the fused kernels,
            as if triton were installed, unless ``config.elementwise`` is ``foreach``.
        nodes: the node of each rank, see ``streams.nodes_of``.
    """
    size = optimizers[0].plan.size
    numerics = Numerics(config, device)
    streams = Streams(hardware, size, nodes, host_works=not numerics.on_gpu)
    steps = [_Steps(optimizer, numerics, streams) for optimizer in optimizers]
    counts = [len(optimizer.plan.rounds) for optimizer in optimizers]
    for event in step_events(counts):
        steps[event.optimizer].run(event)
    return _result_of(streams, tuple(counts))


def price_adamw(optimizers: Sequence[Optimizer], hardware: Hardware) -> float:
    """Seconds of AdamW's step where all parameters of the stage are its own."""
    streams = Streams(hardware, optimizers[0].plan.size)
    for optimizer in optimizers:
        streams.run(ADAMW, partial(_adamw_of, hardware, optimizer, optimizer.elements))
    return max(streams.ends)


def adamw(hardware: Hardware, elements: int) -> Cost:
    """The cost of a fused AdamW over a rank's elements."""
    return foreach(hardware, elements, 1, _ADAMW)


def around(optimizers: Sequence[Optimizer], hardware: Hardware) -> dict[str, float]:
    """Seconds of Megatron's norm, clip and copy to 16-bit weights, by name, on the rank
    with most elements; FusedAdam's states need no copy.
    """
    most = max(total([one.elements for one in optimizers]))
    seconds = {name: most * each / hardware.memory for name, each in AROUND.items()}
    copies = any(one.has_main and one.held.main == WIDE.main for one in optimizers)
    return seconds | {"copy": seconds["copy"] * copies}


def host_python(optimizers: Sequence[Optimizer], hardware: Hardware) -> float:
    """Seconds of the host for Muon's shards of the rank that has most: their Python,
    and a launch of each one's copy.
    """
    shards: Counter[int] = Counter()
    for one in optimizers:
        each = {(cut.rank, cut.parameter) for cut in one.plan.slices}
        shards.update(rank for rank, _ in each)
    seconds = (hardware.shard_us + hardware.launch_us) * MICRO
    return seconds * max(shards.values(), default=0)


def _adamw_of(
    hardware: Hardware, optimizer: Optimizer, elements: Sequence[int], rank: int
) -> Cost:
    return adamw(hardware, round(elements[rank] * (1 - optimizer.held.on_host)))


class _Steps:
    """One optimizer's step: the cost of each of its events on all ranks."""

    def __init__(
        self, optimizer: Optimizer, numerics: Numerics, streams: Streams
    ) -> None:
        self._optimizer, self._numerics, self._streams = optimizer, numerics, streams
        self._hardware, self._config = streams.hardware, numerics.config
        # Homes are neighbours in the stage, of which a node may have fewer than it has
        # GPUs.
        self._sharing = replace(
            self._hardware, gpus_per_node=neighbours_of(streams.nodes)
        )
        self._rounds = rounds_of(optimizer.plan)
        self._arrivals: list[Mapping[int, float]] = [{} for _ in self._rounds]
        self._scratch = scratch_limit(optimizer.plan.matrices)
        self._fused = is_fused(numerics)
        self._itemsize = optimizer.plan.itemsize

    def run(self, event: Event) -> None:
        """Do what an event says on all ranks that it is for."""
        if event.action == "adamw":
            one = self._optimizer
            self._streams.run(ADAMW, partial(_adamw_of, self._hardware, one, one.rest))
        else:
            self._run(event, self._rounds[event.round])

    def _run(self, event: Event, work: RoundWork) -> None:
        streams, number = self._streams, event.round
        ranks = work.ranks(event.travels, asks=sums.asks(self._numerics))
        match event.action:
            case "start":
                streams.run(MOMENTUM, partial(self._momentum, work), ranks)
                if event.travels:
                    self._arrivals[number] = streams.exchange(work.gather)
            case "assemble":
                streams.wait(self._arrivals[number])
                copied = partial(self._copied, work, work.arriving)
                streams.run(STAGING, copied, ranks)
            case "orthogonalize":
                streams.run(NEWTON_SCHULZ, partial(self._orthogonalized, work), ranks)
            case "scatter":
                copied = partial(self._copied, work, work.leaving)
                streams.run(STAGING, copied, ranks)
                self._arrivals[number] = streams.exchange(work.scatter)
            case "update":
                if event.travels:
                    streams.wait(self._arrivals[number])
                streams.run(UPDATE, partial(self._updated, work), ranks)

    def _momentum(self, work: RoundWork, rank: int) -> Cost:
        elements, pieces = sum(work.slices[rank]), work.pieces[rank]
        if not elements:
            return Cost()
        packed = self._summed("gather", work, rank)
        if self._config.momentum_dtype == "int8":
            nbytes, launches = _PACKED
            packed += stream(self._hardware, elements * nbytes, launches * pieces)
        if self._fused:
            return packed + self._in_one(elements, *_FUSED_MOMENTUM)
        nbytes, operations = _MOMENTUM[self._config.nesterov]
        cost = foreach(
            self._hardware, elements, pieces, nbytes + self._itemsize, operations
        )
        cost += packed + foreach(self._hardware, elements, pieces, _NORM)
        return cost + stream(self._hardware, 0, _FLAGS)

    def _updated(self, work: RoundWork, rank: int) -> Cost:
        elements, pieces = sum(work.slices[rank]), work.pieces[rank]
        cost = self._summed("scatter", work, rank)
        if self._fused:
            return cost + self._in_one(elements, *_FUSED_UPDATE)
        nbytes, operations = _UPDATE
        return cost + foreach(
            self._hardware, elements, pieces, nbytes + self._itemsize, operations
        )

    def _summed(self, point: sums.Point, work: RoundWork, rank: int) -> Cost:
        """The cost of the sums that a rule asks for at a point."""
        slices = work.slices[rank]
        return sums.cost(point, self._hardware, slices, work.size, self._numerics)

    def _in_one(self, elements: int, nbytes: int, launches: int) -> Cost:
        """The cost of one kernel over a rank's elements, with what is beside it."""
        if not elements:
            return Cost()
        return stream(self._hardware, elements * (nbytes + self._itemsize), launches)

    def _copied(self, work: RoundWork, travels: Slices, rank: int) -> Cost:
        """The cost of a copy of what travels, and of what is kept if it does not stay
        in place.
        """
        slices = travels[rank]
        if slices and not work.in_place(rank):
            slices = slices + work.kept[rank]
        return foreach(self._hardware, sum(slices), len(slices), 2 * self._itemsize)

    def _orthogonalized(self, work: RoundWork, rank: int) -> Cost:
        cost = Cost()
        most = self._config.ns_batch if self._numerics.on_gpu else 1
        for layout, count in work.layouts[rank].items():
            rows, cols = layout[:2]
            numerics = self._numerics.where(layout.own)
            nbytes = 3 * self._itemsize * rows * cols * count  # two reads and a write
            if numerics.config.scale_mode == "update_norm":
                cost += stream(self._hardware, nbytes, _TO_NORM)
            if row_of(numerics.config.rule).moments:
                cost += stream(self._hardware, nbytes, _TO_MOMENTS * count)
            if layout.shared is not None:
                strip = self._strip(layout.shared, rows * cols, numerics)
                cost += strip.times(count)
                continue
            for batch, times in batches(
                rows, cols, count, ns_batch=most, scratch=self._scratch
            ):
                kind = rows, cols, batch, numerics
                cost += newton_schulz(self._hardware, *kind).times(times)
        return cost

    def _strip(self, shared: Shared, elements: int, numerics: Numerics) -> Cost:
        homes, hardware = min(shared.strips, self._optimizer.plan.size), self._sharing
        cost = newton_schulz_strip(
            hardware, shared.whole, shared.long, shared.strips, homes, numerics
        )
        if shared.comes_as_rows:
            # its columns, and its rows back
            moved = shared.whole[0] * shared.long + elements
            cost += rows_for_columns(hardware, moved * self._itemsize, homes)
        return cost


def _result_of(streams: Streams, rounds: tuple[int, ...]) -> StepTime:
    """The times of a step that has run on some streams, with its numbers of rounds."""
    ends, idle = streams.ends, [0.0] * len(streams.host)
    work = streams.spent.get(NEWTON_SCHULZ, idle)
    waited = streams.spent.get(WAITING, idle)
    hidden = (max(0.0, t - w) for t, w in zip(streams.travelling, waited, strict=True))
    return StepTime(
        seconds=max(ends),
        rounds=rounds,
        launches=max(streams.launches),
        newton_schulz_busiest=max(work),
        exposed_mean=sum(waited) / len(waited),
        exposed_most=max(waited),
        hidden_mean=sum(hidden) / len(waited),
        host=max(streams.host),
        phases={name: max(streams.spent.get(name, idle)) for name in PHASES},
        by_rank=tuple(ends),
    )
