"""What the order of parameters in rounds is worth.

``cd tests && python -m figures.scale.round_orders [WORD ...]``

Prices the step of ``figures.priced_models``' stages with the rounds made in other orders:

ours
    the plan's: of ``turn`` and equal shares with small matrices first, what its own two speeds
    price less.
turn
    the order in which ranks would reach their matrices, each working through its own.
index
    the order of the parameters in the model.
busiest
    parameters of the rank with most work first; of one rank, its largest first.
chain
    the largest remaining chain first: a parameter comes before others if its home has more work
    left when it comes, its own included.
small-last
    as ``turn``, with each rank's largest matrices first, so that the last directions are few.

``--worst`` also prices random orders, and prints the range.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence

from figures.priced_models import CASES
from figures.priced_stages import priced_of
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.presets import hardware_of
from megatron_muon.lab.pricing.step import StepTime
from megatron_muon.planning.rounds import cut as rounds
from megatron_muon.planning.rounds import stage as rounds_of_stage
from megatron_muon.planning.rounds.cut import Loads
from megatron_muon.runtime.patches import replaced
from support.virtual_gpu.plans import OVERLAP

Order = Callable[[Sequence[Loads]], list[int]]
_in_turn: Order = rounds._in_turn


def _index(homed: Sequence[Loads]) -> list[int]:
    return list(range(len(homed)))


def _bytes(homed: Sequence[Loads]) -> dict[int, int]:
    """Bytes of all matrices of each home, which stand for its work."""
    total: dict[int, int] = defaultdict(int)
    for loads in homed:
        for rank, count in loads.items():
            total[rank] += count
    return total


def _busiest(homed: Sequence[Loads]) -> list[int]:
    total = _bytes(homed)

    def key(index: int) -> tuple[int, int, int]:
        loads = homed[index]
        return -max(total[rank] for rank in loads), -sum(loads.values()), index

    return sorted(range(len(homed)), key=key)


def _chain(homed: Sequence[Loads]) -> list[int]:
    left = _bytes(homed)
    waiting, order = set(range(len(homed))), []
    by_home: dict[int, list[int]] = defaultdict(list)
    for index, loads in enumerate(homed):
        by_home[max(loads, key=lambda rank: loads[rank])].append(index)
    for mine in by_home.values():
        mine.sort(key=lambda index: (sum(homed[index].values()), -index))
    while waiting:
        home = max((h for h in by_home if by_home[h]), key=lambda h: (left[h], -h))
        index = by_home[home].pop()
        waiting.discard(index)
        order.append(index)
        for rank, count in homed[index].items():
            left[rank] -= count
    return order


def _small_last(homed: Sequence[Loads]) -> list[int]:
    by_size = sorted(range(len(homed)), key=lambda index: (-sum(homed[index].values()), index))
    turn = _in_turn([homed[index] for index in by_size])
    return [by_size[at] for at in turn]


def shuffled(seed: int) -> Order:
    """An order by chance."""

    def order(homed: Sequence[Loads]) -> list[int]:
        indices = list(range(len(homed)))
        random.Random(seed).shuffle(indices)
        return indices

    return order


ORDERS: dict[str, Order] = {
    "turn": _in_turn,
    "index": _index,
    "busiest": _busiest,
    "chain": _chain,
    "small-last": _small_last,
}


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="random orders to price")
    given = parser.parse_args()
    hardware = hardware_of(given.hardware, [])
    orders = {**ORDERS, **{f"random {n}": shuffled(n) for n in range(given.worst)}}
    print(f"| ms | rounds | ours | {' | '.join(orders)} |")
    print("|---" + "|--:" * (len(orders) + 2) + "|")
    for case in CASES:
        if given.words and not any(word in case.name for word in given.words):
            continue
        words = f"{case.words} {OVERLAP} --stage {case.stage}".split()
        ours = _step(words, hardware)
        steps = [ours]
        for order in orders.values():
            with (
                replaced(rounds, _in_turn=order),
                replaced(rounds_of_stage, smaller_first=_as_in_turn),
            ):
                steps.append(_step(words, hardware))
        cells = [case.name, "+".join(map(str, ours.rounds))]
        cells += [f"{1e3 * step.seconds:.1f}" for step in steps]
        print(f"| {' | '.join(cells)} |", flush=True)


def _step(words: Sequence[str], hardware: Hardware) -> StepTime:
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (stage,), _ = priced_of(words, hardware)
    return stage.ours[-1].step


def _as_in_turn(
    homed: Sequence[Loads], taken: Sequence[Loads], limit: int | None, least: int
) -> tuple[tuple[int, ...], ...]:
    return rounds.make_rounds(homed, taken, limit)


if __name__ == "__main__":
    main()
