"""How long a forward pass waits for its first parameters, gathered in it or within the step.

``cd tests && python -m figures.scale.early_sleeps`` prints seconds of a step, and of the wait after
it, without and with ``early_param_gather``.

Megatron's optimizer, its buckets and its all-gather are real, over gloo; Newton-Schulz is a sleep,
which needs no core, so that gathers travel while ranks work, as they do beside GPUs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron_muon.runtime import round as muon_round
from support.models.gpt import Case, Topology, set_schedule, start, write_grads
from support.ranks import run

RANKS, VOCAB = 4, 1 << 18  # the first bucket is the embedding, of 50 MB
ROUNDS, SECONDS = 8, 0.1  # a round for each weight, and the sleep of one matrix


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step and of the wait after it, on the slowest rank."""

    step: float
    wait: float


def measured(*, early: bool, repeats: int = 3) -> Times:
    """The fastest of some steps: what else runs on the machine only makes steps slower."""
    times = run(_steps, RANKS, early, repeats)
    slowest = [tuple(map(max, zip(*of_step, strict=True))) for of_step in zip(*times, strict=True)]
    return Times(*min(slowest, key=sum))


def _steps(early: bool, repeats: int) -> list[tuple[float, float]]:
    muon = (
        ("round_bytes", 1),
        ("homes", "balanced"),
        ("early_param_gather", "on" if early else "off"),
    )
    case = Case(vocab=VOCAB, tied=True, steps=0, muon=muon)
    built = start(case, Topology(dp=RANKS, overlap=True))
    (part,) = built.optimizer.chained_optimizers
    assert len(part.muon.rounds) == ROUNDS and (part.early_gathers is not None) == early
    write_grads(built, 0)
    with mock.patch.object(muon_round, "orthogonalize_staged", _sleep):
        return [_step(built) for _ in range(1 + repeats)][1:]


def _sleep(staged: Any, moves: Any, *rest: Any, **shape: int) -> None:
    time.sleep(SECONDS * len(moves))


def _step(built: Any) -> tuple[float, float]:
    set_schedule(built, 0)
    for group in built.ddp.bucket_groups:
        group.param_gather_dispatched = False  # as the backward pass says
    dist.barrier()
    begun = time.perf_counter()
    built.optimizer.step()
    done = time.perf_counter()
    built.ddp.bucket_groups[-1].finish_param_sync(skip_next_bucket_dispatch=True)
    waited = time.perf_counter()
    dist.barrier()
    return done - begun, waited - done


def main() -> None:
    """Print a line without and with it."""
    for early in (False, True):
        times = measured(early=early)
        print(
            f"{RANKS} ranks, {ROUNDS} rounds, a first bucket of {2 * VOCAB * 96 / 1e6:.0f} MB, "
            f"gathered {'within the step' if early else 'in the forward pass'}: step "
            f"{times.step:.2f} s, then {times.wait:.3f} s of waiting",
            flush=True,
        )


if __name__ == "__main__":
    from figures.scale import early_sleeps  # workers import the function that they run

    early_sleeps.main()
