"""``megatron-muon certify``: an optimizer step of a user's model on a GPU that is not there."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.files.writable import require_writable
from megatron_muon.lab.dry_run.numbers import MOST_RANKS, count, up_to
from megatron_muon.lab.routes.model_flags import (
    REFUSALS,
    add_model_flags,
    import_megatron,
    megatron_is_quiet,
    said,
    settled,
)

_PROGRAM = "megatron-muon certify"
_DESCRIPTION = """\
Have ranks of a run take steps of Megatron's whole optimizer on a virtual GPU. Megatron-LM's own
flags describe the run. Every kernel, collective, allocation and wait of the host is recorded with
its stream, and nothing is computed. Prints what a step takes, and a verdict: no race, no early
free, no unmatched send, no rank out of order. Neither a GPU nor a launcher is needed; a GPU that is
there is not used. docs/certify.md says what only a GPU can show."""
_MOST_CLIP = 1e30


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        0 where every claim of the verdict holds, 1 where one does not; wrong arguments end the
        process with status 2, as argparse does.
    """
    import_megatron(_PROGRAM, "virtual_gpu")
    parser = _parser()
    given = parser.parse_args(argv)
    from megatron_muon.lab.certify.certificate import certify
    from megatron_muon.lab.certify.kinds import stage_kinds
    from megatron_muon.lab.certify.report import as_json, as_text
    from megatron_muon.lab.virtual_gpu.megatron import OptimizerSettings

    start = time.perf_counter()
    try:
        if given.json is not None:
            require_writable("--json", given.json)
        run = settled(given)
        with megatron_is_quiet():
            kinds = stage_kinds(given, run, given.ranks)
        training = OptimizerSettings(clip_grad=given.clip_grad)
        certificate = certify(given, run, kinds, training, _progress)
    except REFUSALS as error:
        parser.error(said(error))
    notes = list(run.notes)
    seconds = time.perf_counter() - start
    print(as_text(certificate, run, notes, seconds))
    if given.json is not None:
        given.json.write_text(as_json(certificate, run, notes, seconds))
    return 0 if certificate.holds else 1


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"{_PROGRAM}: {text}", file=sys.stderr)


def _ranks(text: str) -> int:
    """0 for all."""
    return 0 if text == "all" else count(most=MOST_RANKS)(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        usage=f"{_PROGRAM} FLAGS --world-size N [--ranks all|K] [--json FILE] (--help lists them)",
        description=_DESCRIPTION,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world-size", type=count(most=MOST_RANKS), required=True, metavar="N")
    parser.add_argument(
        "--ranks",
        type=_ranks,
        metavar="all|K",
        help="ranks of each kind of pipeline stage that take a step (default: all of a stage of at "
        "most 8 ranks, else 4)",
    )
    parser.add_argument(
        "--clip-grad",
        type=up_to(_MOST_CLIP),
        default=1.0,
        metavar="NORM",
        help="norm that gradients are clipped to; 0 for no clipping (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures and faults")
    add_model_flags(parser)
    return parser
