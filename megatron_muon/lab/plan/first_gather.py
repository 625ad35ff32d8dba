"""The all-gather that a forward pass waits for, and what ``early_param_gather`` hides of it.

With ``overlap_param_gather`` Megatron gathers a bucket while the layers before it are at work, so
only the first one is surely waited for. AdamW has that gather, too; it is in no optimizer's step
here. Others that start within the step are counted, and nothing is said of their time: how much of
it layers would have hidden depends on the micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_muon.lab.dry_run.model import Ranks
from megatron_muon.lab.dry_run.stages import Planned
from megatron_muon.lab.plan.rows import PlannedStep
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.planning.rounds.gathers import ADAMW, starts

_PARAMETER = 2  # bytes in 16 bits


@dataclass(frozen=True, slots=True)
class FirstGather:
    """The first bucket of an optimizer, by the order of the forward pass.

    Attributes:
        experts: whether it is of experts' parameters.
        nbytes: bytes of its parameters.
        round: the last round with one of them, or ``ADAMW``; ``rounds``: their number.
        seconds: of its gather, by bytes over the slowest link, without latency.
        buckets: the number of all buckets; ``early``: of those that start before the last round.
        early_nbytes: bytes of those.
        most, least: seconds of it that pass within the step if it starts after ``round``: with the
            links to itself, and in the time in which the exchange leaves them idle.
    """

    experts: bool
    nbytes: int
    round: int
    rounds: int
    seconds: float
    buckets: int
    early: int
    early_nbytes: int
    most: float
    least: float

    @property
    def after(self) -> str:
        """What comes before it."""
        return "AdamW" if self.round == ADAMW else f"round {self.round + 1} of {self.rounds}"


def first_gathers(
    planned: Sequence[Planned], step: PlannedStep, ranks: Ranks, hardware: Hardware
) -> Iterator[FirstGather]:
    """That of each optimizer of a stage.

    Args:
        planned: the optimizers in the order of their steps.
        step: the stage's step by the same plans.
        ranks: those of the run.
        hardware: of every rank.
    """
    one_by_one = ranks.tp * ranks.cp > 1  # one hardware queue, as Megatron demands before Blackwell
    for number, (one, times) in enumerate(zip(planned, step.updated, strict=True), 1):
        buckets = list(_buckets(one))
        nbytes, round = buckets[0]
        last = len(one.plan.rounds) - 1
        after = starts(
            (updated for _, updated in buckets),
            last,
            one_by_one=one_by_one,
            is_followed=any(other.plan.rounds for other in planned[number:]),
        )
        early = [
            size
            for (size, _), at in zip(buckets, after, strict=True)
            if at is not None and at < last
        ]
        seconds = _gather(nbytes, one.experts, ranks, hardware)
        left = max(0.0, step.seconds - times[round - ADAMW])
        idle = max(0.0, left - step.hidden - step.exposed.mean)
        yield FirstGather(
            experts=one.experts,
            nbytes=nbytes,
            round=round,
            rounds=len(one.plan.rounds),
            seconds=seconds,
            buckets=len(buckets),
            early=len(early),
            early_nbytes=sum(early),
            most=min(seconds, left),
            least=min(seconds, idle),
        )


def _buckets(planned: Planned) -> Iterator[tuple[int, int]]:
    """Bytes of each in the order of the forward pass, and the last round that updates it.

    Megatron fills buckets from the end, and the rounds are those of any EP rank.
    """
    rounds: dict[tuple[int, int], int] = defaultdict(lambda: ADAMW)
    round_of = planned.plan.round_of()
    for index, parameter in enumerate(planned.plan.parameters):
        place = parameter.buffer, parameter.bucket.start
        rounds[place] = max(rounds[place], round_of[index])
    for number, buffer in enumerate(planned.buffers):
        for bucket in reversed(buffer.buckets):
            yield _PARAMETER * bucket.grad_data.numel(), rounds[number, bucket.offset]


def _gather(nbytes: int, experts: bool, ranks: Ranks, hardware: Hardware) -> float:
    """Seconds of an all-gather over the ranks that share a buffer, by the slowest link it uses."""
    apart = ranks.expert_tp * ranks.ep if experts else ranks.tp
    size = ranks.world // (apart * ranks.pp * ranks.instances)  # with CP
    is_near = size * apart <= hardware.gpus_per_node
    link = hardware.node_link if is_near else hardware.network_link
    return nbytes * (size - 1) / size / link
