"""``megatron-muon plan``: what Muon costs in a run that has not started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.dry_run.numbers import MOST_THINGS, count, up_to
from megatron_muon.lab.outputs import parser_of, require_outputs, write_json
from megatron_muon.lab.plan.request import DEVICES, Request
from megatron_muon.lab.plan.training import MFU
from megatron_muon.lab.pricing.presets import PRESETS
from megatron_muon.lab.routes.model_flags import (
    OF_MODELS,
    REFUSALS,
    USAGE,
    CommandLine,
    import_megatron,
    said,
    stop,
)
from megatron_muon.lab.tables import print_lines, wrapped

PROGRAM = "megatron-muon plan"
_DESCRIPTION = f"""\
What Muon will cost in a run that has not started: bytes, messages, work, memory
and time of an optimizer step in both layouts, beside AdamW and Megatron's own
Muon.

{OF_MODELS}

The exchange plans are those of the run. Times are a time model's on stated
hardware. Nothing is measured, and neither a GPU nor a launcher is needed.
docs/plan.md explains it."""


def main(argv: Sequence[str]) -> int:
    """Run the command; wrong arguments end the process with status 2, as argparse does.

    Returns:
        2 where every value of ``--sweep`` is refused, else 0.
    """
    line = command_line(argv)
    import_megatron(PROGRAM, script=line.script)
    args = line.args
    assumptions: bool = args.assumptions
    status = 0
    try:
        require_outputs(args)
        if args.sweep is None:
            figures = _planned(Request.of(line), args.explain, assumptions)
        else:
            figures, status = _swept(line, args.sweep, assumptions)
        write_json(args.json, figures)
    except BrokenPipeError:
        raise  # the reader of the output is gone
    except (*REFUSALS, TypeError, OSError) as error:
        stop(said(error), PROGRAM)
    return status


def _planned(request: Request, explain: bool, assumptions: bool) -> dict[str, object]:
    """Print the plan of the run, as its flags ask for; return all of its figures."""
    from megatron_muon.lab.plan import report, variants
    from megatron_muon.lab.plan.run import plan_run

    plan = plan_run(request)
    print_lines([report.as_text(plan)])
    if assumptions:
        print_lines(["", *report.assumption_lines(plan)])
    figures = report.as_json_ready(plan)
    if explain:
        lines, figures["changes"] = variants.explained(request, plan)
        print_lines(["", *lines])
    print(f"\n{report.answer(plan)}")
    return figures


def _swept(
    line: CommandLine, sweep: str, assumptions: bool
) -> tuple[dict[str, object], int]:
    """Print a row for each value; return all figures, and the exit status."""
    from megatron_muon.lab.plan import report, variants
    from megatron_muon.lab.plan.run import plan_run

    name, values = variants.swept(sweep)
    outcomes = variants.planned(
        values, lambda flags: plan_run(Request.of(line, *flags))
    )
    plans = variants.accepted(outcomes)
    lines = variants.table(name, plans) if plans else []
    points: list[dict[str, object]] = []
    for variant, outcome in outcomes:
        point: dict[str, object] = {"value": variant.name}
        if isinstance(outcome, str):
            lines += wrapped(f"{variant.name}: refused: {outcome}")
            points.append(point | {"refused": outcome})
        else:
            points.append(point | report.as_json_ready(outcome))
    if plans and assumptions:
        lines += ["", *report.assumption_lines(plans[0][1])]
    print_lines(lines)
    return {"sweep": name, "points": points}, 0 if plans else 2


def command_line(argv: Sequence[str]) -> CommandLine:
    """Read the command's options; what comes behind them is the run's."""
    parser = _parser()
    line = CommandLine(parser, argv)
    args = line.args
    is_swept = (args.sweep or "").removeprefix("--").startswith(("dp=", "world-size="))
    if not (args.world_size or args.dp or is_swept or "WORLD_SIZE" in os.environ):
        parser.error(
            "the following arguments are required: --world-size or --dp (or --sweep "
            "dp=...)"
        )
    if args.explain and args.sweep is not None:
        parser.error("--explain is about one run: give it without --sweep")
    return line


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(PROGRAM, _DESCRIPTION, usage=USAGE.format(PROGRAM))
    add = parser.add_argument
    text = f"the GPUs: {', '.join(PRESETS)}, or a JSON file of constants (%(default)s)"
    add("--hardware", default="h100", metavar="NAME|FILE", help=text)
    text = "another value of a constant of --hardware; may be given several times"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = (
        "symmetric products: torch's, those of quack-kernels (kernel), or those of "
        "--muon-symmetric-products triton (%(default)s)"
    )
    add("--products", choices=DEVICES, default="torch", help=text)
    text = f"share of the peak that forward and backward reach ({MFU})"
    add("--mfu", type=up_to(1.0, 0.001), metavar="SHARE", help=text)
    number = count(0, MOST_THINGS)
    add("--stage", type=number, metavar="N", help="only this pipeline stage")
    text = (
        "plan the run at several values of dp, tp, pp, cp, ep, batch, or of a flag, "
        "written without its dashes; none leaves the flag out, given is for a flag "
        "without a value"
    )
    add("--sweep", metavar="NAME=VALUE,...", help=text)
    text = "plan other settings, too, and print which of them are faster"
    add("--explain", action="store_true", help=text)
    text = "print every assumption with its source"
    add("--assumptions", action="store_true", help=text)
    add("--json", type=Path, metavar="FILE", help="write all figures and assumptions")
    return parser
