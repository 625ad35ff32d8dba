"""``megatron-muon accept``: every check of the package on this node, with a report."""

from __future__ import annotations

import argparse
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from megatron_muon.files.durable import write_text
from megatron_muon.files.writable import require_writable
from megatron_muon.lab.accept.outcome import Outcome, not_run
from megatron_muon.lab.accept.processes import run_check
from megatron_muon.lab.accept.record import NAME, REPORT, Record, resumed
from megatron_muon.lab.accept.settings import DeviceName, Settings
from megatron_muon.lab.accept.table import CHECKS, Check
from megatron_muon.lab.dry_run.numbers import count, up_to

_PROGRAM = "megatron-muon accept"
_DESCRIPTION = f"""\
Run every check of this package on this node, each in processes of its own with a time limit, and
write {NAME} and {REPORT}, a report to attach to an issue. It needs no internet. A second call with
the same folder goes on where the first ended, if versions, device and settings are the same."""
_EPILOG = """\
exit status:
  0  no check failed, and none is left to run
  1  one failed, or is left to run: the report says which, and why
  2  wrong arguments"""
_FOLDER = Path("megatron_muon_accept")
_LEAST_SECONDS = 5.0  # left, for a check to start
_CPU_RANKS = 2


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        The exit status, as ``--help`` lists them; wrong arguments end the process with 2.
    """
    from megatron_muon.lab.routes.model_flags import megatron_is_quiet

    end = time.monotonic()
    parser = _parser()
    given = parser.parse_args(argv)
    end += 60 * given.minutes
    try:
        settings = _settings(given)
        if given.json is not None:
            require_writable("--json", given.json)
        folder = _folder(given.folder)
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    from megatron_muon.lab.accept.environment import described, identity

    try:
        with megatron_is_quiet():
            environment = identity(settings)
        record, line = resumed(folder, environment, described(settings))
        _say(f"{folder}: {line}")
        _run_all(record, settings, folder, given, end)
        return _report(record, folder, given)
    except BrokenPipeError:
        raise  # the reader of the output is gone, which is no error of a file
    except OSError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 1


def _run_all(
    record: Record, settings: Settings, folder: Path, given: Namespace, end: float
) -> None:
    """Run what is to be run; ``accept.json`` is written before and after every check."""
    for check in CHECKS:
        asked = given.only is None or check.name in given.only
        if not asked or (given.only is None and record.is_settled(check.name)):
            continue
        left = end - time.monotonic()
        if left < _LEAST_SECONDS:
            why = f"the call's {given.minutes:g} minutes were over"
            record.outcomes[check.name] = not_run(check.name, why, is_final=False)
            continue
        record.running = check.name
        record.write(folder)
        _say(f"{check.name} ...")
        outcome = run_check(check, settings, folder, left)
        record.outcomes[check.name] = outcome
        record.running = ""
        record.ended.pop(check.name, None)
        record.write(folder)
        _say(f"{check.name}: {outcome.verdict}, {outcome.seconds:.0f} s")


def _report(record: Record, folder: Path, given: Namespace) -> int:
    from megatron_muon.lab.accept.report import as_markdown

    outcomes = [_outcome_of(record, check) for check in CHECKS]
    text = as_markdown(record.environment, outcomes)
    record.write(folder)
    write_text(folder / REPORT, text)
    if given.json is not None:
        given.json.write_text(record.as_text())
    print(text)
    _say(f"attach {folder / REPORT} to an issue; {folder / NAME} has everything")
    is_good = all(each.verdict != "FAILED" and each.is_final for each in outcomes)
    return 0 if is_good else 1


def _outcome_of(record: Record, check: Check) -> Outcome:
    if check.name in record.outcomes:
        return record.outcomes[check.name]
    return not_run(check.name, "not asked for by --only", is_final=False)


def _say(text: str) -> None:
    print(f"{_PROGRAM}: {text}", file=sys.stderr, flush=True)


def _settings(given: Namespace) -> Settings:
    """The settings of the call.

    Raises:
        ValueError, TypeError, OSError: flags are wrong or do not fit this machine; names the flag.
    """
    import torch

    from megatron_muon.lab.pricing.presets import hardware_of

    gpus = torch.cuda.device_count()
    device: DeviceName = given.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise ValueError(
            "--device cuda: torch sees no GPU here; leave it out for the CPU, or give virtual"
        )
    ranks = given.ranks or (gpus if device == "cuda" else _CPU_RANKS)
    if device == "cuda" and ranks > gpus:
        raise ValueError(f"--ranks {ranks}: each needs a GPU, and torch sees {gpus}")
    if ranks > 1 and ranks % 2:
        raise ValueError(f"--ranks {ranks}: give 1 or an even number, which TP and DP divide")
    hardware_of(given.hardware, given.set)
    hardware = given.hardware
    if Path(hardware).is_file():
        hardware = str(Path(hardware).resolve())
    return Settings(device, ranks, hardware, tuple(given.set))


def _folder(folder: Path) -> Path:
    """The folder, made if it is not there.

    Raises:
        ValueError: it cannot be.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(f"--folder {folder}: {error.strerror}") from None
    require_writable("--folder", folder / NAME)
    return folder.resolve()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=_FOLDER,
        metavar="DIR",
        help="folder of all files (%(default)s)",
    )
    parser.add_argument(
        "--ranks",
        type=count(most=64),
        metavar="N",
        help="ranks (default: one for each GPU; 2 without one)",
    )
    parser.add_argument(
        "--device",
        choices=get_args(DeviceName),
        help="virtual takes a GPU's branches without one (default: cuda where it is, else cpu)",
    )
    parser.add_argument(
        "--minutes",
        type=up_to(10_000, least=0.01),
        default=15,
        metavar="N",
        help="minutes of this call; a second call goes on (%(default)s)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[check.name for check in CHECKS],
        metavar="NAME",
        help=f"only these checks, also if they have run: {', '.join(c.name for c in CHECKS)}",
    )
    parser.add_argument(
        "--hardware",
        default="h100",
        metavar="NAME|FILE",
        help="hardware of the predicted times, as for megatron-muon plan (%(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another value of one of its constants; may be given several times",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write a copy of {NAME}")
    return parser
