"""Two large matrices on 16 processes, whole and shared: the real exchange, Newton-Schulz a sleep.

``cd tests && python -m figures.scale.shared_sleeps`` prints the step's time with and without.

A sleep needs no core, so 16 ranks work at the same time on fewer cores. Messages are real, those
between homes too; the matrices are small, and the sleeps are as long as the flops of matrices of
their shape take, in proportion.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from figures.sleeping_ranks import muon_of, seconds_of_steps
from megatron_muon.config import MuonConfig
from megatron_muon.orthogonalize.iteration import gathers_of_rows, ns_flops, strip_flops
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.layout import Parameter, Span, whole_matrix
from megatron_muon.planning.plan import ExchangePlan, make_plan
from megatron_muon.runtime import round as muon_round
from support.ranks import run
from support.small_squares import rows_of_small_squares

RANKS, MATRICES, ROWS, COLS = 16, 2, 448, 64  # as long as Llama-3-8B's gate and up together
SECONDS = 1.0  # of a whole matrix


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds of the fastest step, with whole matrices and with shared ones."""

    whole: float
    shared: float


def measured(strips: int, repeats: int = 3, *, rows: bool = True) -> Steps:
    """Steps on ``RANKS`` processes, the fastest of some; homes make rows of squares, or all."""

    def of(split: int | None) -> float:
        steps = run(_steps, RANKS, split, repeats, rows)
        return min(map(max, zip(*steps, strict=True)))

    return Steps(of(None), of(strips))


def _config(split: int | None) -> MuonConfig:
    return MuonConfig(ns_iteration="gram", split_matrices=split)


def plan_of(split: int | None) -> ExchangePlan:
    """The matrices one after another in a buffer that is cut into ``RANKS`` shards."""
    each = ROWS * COLS
    parameters = []
    for number in range(MATRICES):
        matrices, blocks = whole_matrix(f"fc1.{number}", (ROWS, COLS), None, 1)
        span, bucket = Span(number * each, (number + 1) * each), Span(0, MATRICES * each)
        shape = (ROWS, COLS)
        parameters.append(
            Parameter(f"fc1.{number}", shape, None, bucket, span, 0, matrices, blocks)
        )
    return make_plan(parameters, RankGrid(((tuple(range(RANKS)),),)), _config(split))


def _steps(split: int | None, repeats: int, rows: bool) -> list[float]:
    with rows_of_small_squares() if rows else nullcontext():
        return _seconds(split, repeats)


def _seconds(split: int | None, repeats: int) -> list[float]:
    """On a rank: seconds of each step, after one that makes the connections."""
    config = _config(split)
    second = SECONDS / ns_flops(ROWS, COLS, config)

    def orthogonalize_staged(
        staged: torch.Tensor, moves: torch.Tensor, config: MuonConfig, **shape: int
    ) -> None:
        time.sleep(len(moves) * ns_flops(shape["rows"], shape["cols"], config) * second)

    def orthogonalize_strips(
        strips: Sequence[torch.Tensor],
        whole: tuple[int, int],
        moves: torch.Tensor,
        config: MuonConfig,
        sharing: Any,
    ) -> None:
        for width in (2, 1):
            sharing.all_numbers(torch.zeros(len(strips), width))
        count, rows = sharing.count, strips[0].size(0)
        flops = strip_flops(*whole, rows, config, "cuda", count=count)
        gathers = gathers_of_rows(*whole, count, config, "cuda")
        each = flops * second / sum(2 + some for some in gathers)
        square = torch.zeros(min(whole), min(whole), dtype=torch.bfloat16)
        for some in gathers:  # its part of the square, then the polynomial, and its strip
            time.sleep(each)
            sharing.add([square] * len(strips))
            for _ in range(some):
                time.sleep(each)
                sharing.together([square[: len(square) // count]] * len(strips))
            time.sleep(each)

    muon, groups, state = muon_of(config, plan_of(split), dist.get_rank())
    with (
        mock.patch.object(muon_round, "orthogonalize_staged", orthogonalize_staged),
        mock.patch.object(muon_round, "orthogonalize_strips", orthogonalize_strips),
    ):
        return seconds_of_steps(muon, groups, state, repeats)


def main() -> None:
    """Print a line for 2, 4 and 8 strips, with all squares at each home and with rows of them."""
    for strips, rows in itertools.product((2, 4, 8), (False, True)):
        steps = measured(strips, rows=rows)
        print(
            f"{MATRICES} matrices of {ROWS}x{COLS} on {RANKS} ranks: whole {steps.whole:.2f} s, "
            f"{strips} strips with {'rows of squares' if rows else 'all squares'} "
            f"{steps.shared:.2f} s, {steps.shared / steps.whole:.2f} times",
            flush=True,
        )


if __name__ == "__main__":
    from figures.scale import shared_sleeps  # workers import the function that they run

    shared_sleeps.main()
