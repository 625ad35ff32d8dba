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
from collections.abc import Iterator
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
class Model:
    """A model, and ``(ranks, further flags, how they are divided)`` of each row."""

    name: str
    preset: str
    worlds: tuple[tuple[int, str, str], ...]


def _worlds(words: str, name: str, *sizes: int) -> tuple[tuple[int, str, str], ...]:
    return tuple((size, words, name) for size in sizes)


MODELS = (
    Model("Llama-3-8B", "llama3-8b", _worlds("--tp 2", "TP2", 32, 256, 1024, 4096)),
    Model(
        "Llama-3-70B",
        "llama3-70b",
        _worlds("--tp 8 --pp 4", "TP8 PP4", 32, 256, 1024, 4096),
    ),
    Model(
        "Qwen3-30B-A3B", "qwen3-30b-a3b", _worlds("--ep 8", "EP8", 32, 256, 1024, 4096)
    ),
    Model(
        "Moonlight 16B",
        "moonlight-16b-a3b",
        _worlds("--ep 8", "EP8", 32, 256, 1024, 4096),
    ),
    *(
        Model(
            name,
            preset,
            _worlds(f"{_PP16} --ep 16", "PP16 EP16", 256)
            + _worlds(f"{_PP16} --ep 64", "PP16 EP64", 1024, 4096),
        )
        for name, preset in (("DeepSeek-V3", "deepseek-v3"), ("Kimi K2", "kimi-k2"))
    ),
)
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
    for model in MODELS:
        if given.words and not any(word in model.name for word in given.words):
            continue
        for line in (by_state if given.states else rows)(model, given.flags):
            print(line, flush=True)


def by_state(model: Model, more: str) -> Iterator[str]:
    """A line for the world of 256 ranks."""
    size, words, name = next(world for world in model.worlds if world[0] == 256)
    argv = f"--model {model.preset} {OVERLAP} {words} --world-size {size} {more}"
    cells = []
    for flags in STATES.values():
        plan = planned(f"{argv} {flags}".split())
        held = [kind.row("contiguous") for kind in plan.kinds]
        host, rest = (
            max(each)
            for each in zip(
                *((r.host, sum(r.rest.values())) for r in held), strict=True
            )
        )
        cell = f"{rest / (1 << 30):.1f} / {plan.peak('contiguous') / (1 << 30):.1f}"
        cells.append(f"{cell}, {host / (1 << 30):.1f}" if host else cell)
    yield f"| {model.name} {name} × {size} | {' | '.join(cells)} |"


def rows(model: Model, more: str) -> Iterator[str]:
    """A line for each of its worlds."""
    for size, words, name in model.worlds:
        argv = (
            f"--model {model.preset} {OVERLAP} {words} --world-size {size} {more}"
        ).split()
        yield (
            f"| {model.name} {name} | {size:,} | {' | '.join(_cells(planned(argv)))} |"
        )


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
