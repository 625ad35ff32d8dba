"""``megatron-muon plan``: what Muon costs in a run that has not started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_muon.console import printable
from megatron_muon.lab.dry_run.numbers import MOST_THINGS, count, up_to
from megatron_muon.lab.outputs import parser_of, require_outputs, write_json
from megatron_muon.lab.plan.training import MFU
from megatron_muon.lab.pricing.presets import PRESETS, hardware_of
from megatron_muon.lab.routes.model_flags import (
    OF_MODELS,
    REFUSALS,
    USAGE,
    CommandLine,
    import_megatron,
    said,
    stop,
)
from megatron_muon.lab.tables import wrapped
from megatron_muon.orthogonalize.numerics import Device

PROGRAM = "megatron-muon plan"
_DESCRIPTION = f"""\
What Muon will cost in a run that has not started: bytes, messages, work, memory
and time of an optimizer step in both layouts, beside AdamW and Megatron's own
Muon.

{OF_MODELS}

The exchange plans are those of the run. Times are a time model's on stated
hardware. Nothing is measured, and neither a GPU nor a launcher is needed.
docs/plan.md explains it."""
DEVICES: dict[str, Device] = {"torch": "cuda", "kernel": "cuda_symmetric"}


def main(argv: Sequence[str]) -> int:
    """Run the command; wrong arguments end the process with status 2, as argparse
    does.
    """
    line = command_line(argv)
    import_megatron(PROGRAM, script=line.script)
    given = line.given
    try:
        require_outputs(given)
        written = _swept(line) if given.sweep else _planned(line)
        write_json(given.json, written)
    except (*REFUSALS, TypeError, OSError) as error:
        stop(said(error), PROGRAM)
    return 0


def _planned(line: CommandLine) -> dict[str, Any]:
    """Print the plan of the run; return all of its figures."""
    from megatron_muon.lab.plan import report, variants

    plan = _plan(line, ())
    print(report.as_text(plan))
    if line.given.assumptions:
        print("\n".join(["", *report.assumption_lines(plan)]))
    written = report.as_json_ready(plan)
    if line.given.explain:
        stage = ["--stage", str(plan.slowest.stages[0])] if plan.ranks.pp > 1 else []
        tried = variants.planned(
            variants.changes(plan),
            lambda words: _plan(line, [*stage, *words], wanted=()),
        )
        made = sorted(
            variants.accepted(tried), key=lambda each: each[1].seconds(each[1].layout)
        )
        without = (variants.Variant("none", ()), plan)
        before = plan.seconds(plan.layout)
        lines = variants.table("change, the fastest first", [without, *made], before)
        print("\n".join(["", *lines]))
        written["changes"] = [
            {
                "change": variant.name,
                "also_changes": variant.effect,
                "seconds": (after := changed.seconds(changed.layout)),
                "gain": (before - after) / before,
            }
            for variant, changed in made
        ]
    print(f"\n{report.answer(plan)}")
    return written


def _swept(line: CommandLine) -> dict[str, Any]:
    """Print a row for each value; return all figures."""
    from megatron_muon.lab.plan import report, variants

    name, values = variants.swept(line.given.sweep)
    made = variants.planned(values, partial(_plan, line))
    plans = variants.accepted(made)
    lines = variants.table(name, plans) if plans else []
    for variant, why in made:
        lines += (
            wrapped(f"{variant.name}: refused: {why}") if isinstance(why, str) else []
        )
    if plans and line.given.assumptions:
        lines += ["", *report.assumption_lines(plans[0][1])]
    print(printable("\n".join(lines), kept="\n"))
    points = [
        {"value": variant.name}
        | ({"refused": plan} if isinstance(plan, str) else report.as_json_ready(plan))
        for variant, plan in made
    ]
    return {"sweep": name, "points": points}


def _plan(
    line: CommandLine, words: Sequence[str], wanted: Collection[Any] | None = None
) -> Any:
    """The plan with further flags, of the algorithms that are ``wanted``, or of all."""
    from megatron_muon.lab.plan.rows import NAMES
    from megatron_muon.lab.plan.run import plan_run

    given = line.options(words)
    hardware, device = hardware_of(given.hardware, given.set), DEVICES[given.products]
    return plan_run(line, hardware, device, NAMES if wanted is None else wanted, words)


def command_line(argv: Sequence[str]) -> CommandLine:
    """Read the command's own options; what comes behind them is the run's."""
    made = _parser()
    line = CommandLine(made, argv)
    given = line.given
    is_swept = (given.sweep or "").removeprefix("--").startswith(("dp=", "world-size="))
    if not (given.world_size or given.dp or is_swept or "WORLD_SIZE" in os.environ):
        made.error(
            "the following arguments are required: --world-size or --dp (or --sweep "
            "dp=...)"
        )
    if given.explain and given.sweep is not None:
        made.error("--explain is about one run: leave --sweep out")
    return line


def _parser() -> argparse.ArgumentParser:
    made = parser_of(PROGRAM, _DESCRIPTION, usage=USAGE.format(PROGRAM))
    add = made.add_argument
    text = f"the GPUs: {', '.join(PRESETS)}, or a JSON file of constants (%(default)s)"
    add("--hardware", default="h100", metavar="NAME|FILE", help=text)
    text = "another value of a constant of --hardware; may be given several times"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "symmetric products: torch's, or the kernel of quack-kernels (%(default)s)"
    add("--products", choices=DEVICES, default="torch", help=text)
    text = f"share of the peak that forward and backward reach ({MFU})"
    add("--mfu", type=up_to(1.0, 0.001), metavar="SHARE", help=text)
    add(
        "--stage",
        type=count(0, MOST_THINGS),
        metavar="N",
        help="only this pipeline stage",
    )
    text = (
        "plan the run at several values of dp, tp, pp, cp, ep, batch, or of a "
        "flag, written "
    )
    text += (
        "without its dashes; none leaves the flag out, given is for a flag "
        "without a value"
    )
    add("--sweep", metavar="NAME=VALUE,...", help=text)
    text = "plan other settings, too, and print which of them are faster"
    add("--explain", action="store_true", help=text)
    text = "print every assumption with its source"
    add("--assumptions", action="store_true", help=text)
    add("--json", type=Path, metavar="FILE", help="write all figures and assumptions")
    return made
