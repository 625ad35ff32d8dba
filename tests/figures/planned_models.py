"""Six models at 32 to 4,096 ranks: ``cd tests && python -m figures.planned_models [WORD
...]``.

Prints the table of docs/plan.md, of the models whose name has one of the words. Every
row is ``megatron-muon plan --model`` with the flags below. How the ranks are divided is
an assumption, as is the number of tokens in a step. ``--states`` prints GiB of the
fullest rank by how states are held instead: at rest/at the peak of the step, and what
is on the host.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import megatron_muon.cpu.on  # noqa: F401 before what imports Megatron
from megatron_muon.lab.plan.command import command_line
from megatron_muon.lab.plan.request import Request
from megatron_muon.lab.plan.rows import Name
from megatron_muon.lab.plan.run import RunPlan, plan_run
from megatron_muon.lab.pricing.upstream import TpMode
from support.virtual_gpu.plans import OVERLAP

_PP16 = "--pp 16 --decoder-last-pipeline-num-layers 1"


@dataclass(frozen=True, slots=True)
class World:
    """A model on a number of ranks, and how they are divided."""

    name: str
    size: int
    flags: str


def _worlds(
    name: str, preset: str, words: str, sizes: Sequence[int] = (32, 256, 1024, 4096)
) -> list[World]:
    flags = f"--model {preset} {words} {OVERLAP}"
    return [World(name, size, f"{flags} --world-size {size}") for size in sizes]


WORLDS = [
    *_worlds("Llama-3-8B TP2", "llama3-8b", "--tp 2"),
    *_worlds("Llama-3-70B TP8 PP4", "llama3-70b", "--tp 8 --pp 4"),
    *_worlds("Qwen3-30B-A3B EP8", "qwen3-30b-a3b", "--ep 8"),
    *_worlds("Moonlight 16B EP8", "moonlight-16b-a3b", "--ep 8"),
]
for _name, _preset in (("DeepSeek-V3", "deepseek-v3"), ("Kimi K2", "kimi-k2")):
    for _ep, _sizes in ((16, (256,)), (64, (1024, 4096))):
        _words = f"{_PP16} --ep {_ep}"
        WORLDS += _worlds(f"{_name} PP16 EP{_ep}", _preset, _words, _sizes)
GIB = 1 << 30
_NARROW = "--use-precision-aware-optimizer"
STATES = {
    "fp32": "",
    "int8 momentum": "--muon-momentum-dtype int8",
    "precision-aware": _NARROW,
    "in bf16": f"{_NARROW} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "on the host": f"{_NARROW} --optimizer-cpu-offload",
}
HEAD = (
    "| model | ranks | AdamW | contiguous | bucketed | Megatron's blockwise / "
    "duplicated / distributed / layer_sharded | busiest / mean | longer than AdamW's |"
)


def main() -> None:
    """Print a row as soon as it is planned."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("words", nargs="*")
    arguments.add_argument(
        "--flags", default="", help="further flags of megatron-muon plan"
    )
    arguments.add_argument("--states", action="store_true")
    given = arguments.parse_args()
    if given.states:
        print(f"| | {' | '.join(STATES)} |\n|---|{'--:|' * len(STATES)}", flush=True)
    else:
        print(f"{HEAD}\n|---|--:|{'--:|' * 6}")
    for world in WORLDS:
        if given.words and not any(word in world.name for word in given.words):
            continue
        flags = f"{world.flags} {given.flags}"
        if not given.states:
            cells = " | ".join(_cells(planned(flags.split())))
            print(f"| {world.name} | {world.size:,} | {cells} |", flush=True)
        elif world.size == 256:
            cells = " | ".join(_held(f"{flags} {states}") for states in STATES.values())
            print(f"| {world.name} × {world.size} | {cells} |", flush=True)


def _held(flags: str) -> str:
    """GiB of the fullest rank: at rest / at the peak, and what is on the host."""
    plan = planned(flags.split())
    rows = [kind.row("contiguous") for kind in plan.kinds]
    rest = max(sum(row.rest.values()) for row in rows) / GIB
    host = max(row.host for row in rows) / GIB
    cell = f"{rest:.1f} / {plan.peak('contiguous') / GIB:.1f}"
    return f"{cell}, {host:.1f}" if host else cell


def planned(argv: list[str]) -> RunPlan:
    """The plan of a command line."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan_run(Request.of(command_line(argv)))


def _cells(plan: RunPlan) -> Iterator[str]:
    def ms(name: Name) -> str:
        return f"{1e3 * plan.seconds(name):.1f}" if name in plan.names else "–"

    yield from (ms(name) for name in ("adamw", "contiguous", "bucketed"))
    yield " / ".join(map(ms, get_args(TpMode)))
    yield f"{plan.slowest.row(plan.layout).uneven:.2f}"
    yield f"{plan.slower(plan.layout):+.2%}"


if __name__ == "__main__":
    main()
