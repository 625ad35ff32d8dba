"""``megatron-muon routes``: the optimizer, matrices and homes of every parameter of a
run.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.outputs import parser_of, require_outputs, write_json
from megatron_muon.lab.routes.model_flags import (
    OF_MODELS,
    REFUSALS,
    USAGE,
    CommandLine,
    import_megatron,
    megatron_is_quiet,
    said,
    stop,
)

_DESCRIPTION = f"""\
Every parameter of a run's model with its shape, how tensor parallelism cuts it,
its optimizer, its matrices, their scale and their homes. Nothing is allocated,
and neither a GPU nor a launcher is needed.

{OF_MODELS}"""
_HOMES = """\
A home is the rank of the pipeline stage that orthogonalizes a matrix. A line
for several layers or experts gives the number of different homes; --all and
--json give each home. The homes are those of GPUs without quack-kernels: with
it symmetric products cost less, so some homes can differ."""
_PROGRAM = "megatron-muon routes"


def main(argv: Sequence[str]) -> int:
    """Run the command; wrong arguments end the process with status 2, as argparse
    does.
    """
    line = CommandLine(_parser(), argv)
    args = line.args
    import_megatron(_PROGRAM, script=line.script)
    from megatron_muon.lab.routes.parameters import routes
    from megatron_muon.lab.routes.table import as_text
    from megatron_muon.lab.tables import print_lines, show
    from megatron_muon.mcore.seams.rows import megatron_version

    try:
        require_outputs(args)
        run = line.settled()
        with megatron_is_quiet():
            routed = routes(run)
        package = importlib.import_module("megatron.core")
        core = {"version": megatron_version()[0]}
        core["folder"] = str(Path(package.__path__[0]).resolve())
        if args.json is not None:
            about = {"megatron_core": core, "settings": dataclasses.asdict(run.config)}
            notes = {"notes": (*run.notes, *routed.notes)}
            write_json(args.json, about | dataclasses.asdict(routed) | notes)
    except (*REFUSALS, OSError) as error:
        stop(said(error), _PROGRAM)
    for note in (*run.notes, *routed.notes):
        show(f"{_PROGRAM}: {note}", to=sys.stderr)
    show(f"megatron-core {core['version']} ({core['folder']})", "")
    print_lines([as_text(routed, every=args.all)])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        _PROGRAM, _DESCRIPTION, usage=USAGE.format(_PROGRAM), epilog=_HOMES
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write every parameter and its homes")
    add("--all", action="store_true", help="print a line for every layer and expert")
    return parser
