"""``megatron-muon accept``: run the clone's tests on GPUs on this node, and write a
report.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.accept.report import as_json, as_markdown, as_text
from megatron_muon.lab.accept.results import NO_TIME, Check, read
from megatron_muon.lab.dry_run.numbers import count, up_to
from megatron_muon.lab.outputs import (
    add_outputs,
    parsed,
    parser_of,
    require_writable,
    write_json,
)
from megatron_muon.lab.tables import show
from megatron_muon.mcore.checkpoint.files import write_text

NAME, REPORT = "accept.json", "accept.md"
_PROGRAM = "megatron-muon accept"
_DESCRIPTION = f"""\
Run the tests of tests/gpu on this node, from a clone of the repository, and
write {NAME} and {REPORT}, a report to attach to an issue. Each test
has a time limit and needs no internet. `pytest -m gpu` runs the same tests
without the report."""
_EPILOG = """\
exit status:
  0  no test failed, and there was time for all
  1  one failed, or there was no time for it: the report says which, and why
  2  wrong arguments, or no clone"""
_FOLDER = Path("megatron_muon_accept")
_USAGE = 4  # pytest's exit status for a wrong flag
_GRACE = 60.0  # seconds beyond --minutes until a pytest that hangs is killed
_NEEDED = ("pytest", "pytest_timeout", "hypothesis")


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status, as ``--help`` lists them."""
    parser = _parser()
    args = parsed(parser, argv)
    try:
        tests = _tests()
        names = [
            file.stem.removeprefix("test_gpu_")
            for file in sorted(tests.glob("test_gpu_*.py"))
        ]
        asked = [name.replace("-", "_") for name in args.only or names]
        for name in asked:
            if name not in names:
                raise ValueError(f"--only {name}: choose from {', '.join(names)}")
        folder = _folder(args.folder)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    junit = folder / "junit.xml"
    junit.unlink(missing_ok=True)
    code, ended = _pytest(tests, asked, args, junit)
    if code == _USAGE:
        return 2  # pytest has named the flag
    return _report(*read(names, asked, junit, ended), folder, args)


def _tests() -> Path:
    """The folder tests/gpu beside the package; a ValueError without it, or without
    pytest.
    """
    package = Path(__file__).resolve().parents[2]
    tests = package.parent / "tests" / "gpu"
    if not (tests.parent / "support" / "gpu").is_dir():
        raise ValueError(
            "the tests are beside the package in a clone of the repository only, and "
            f"this package was installed to {package.parent} without them: clone the "
            "repository, `pip install -e '.[test]'` there and run this command again"
        )
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} is not installed: pip install -e "
            f"'{package.parent}[test]'"
        )
    return tests


def _pytest(
    tests: Path, asked: Sequence[str], args: Namespace, junit: Path
) -> tuple[int, str]:
    """Pytest's exit status, and how it ended where that was an error of its own."""
    hardware = Path(args.hardware)
    if hardware.is_file():
        hardware = hardware.resolve()
    seconds = 60 * args.minutes
    command = [sys.executable, "-m", "pytest"]
    command += [str(tests / f"test_gpu_{name}.py") for name in asked]
    command += ["-m", "gpu", "-p", "no:cacheprovider", "--tb=short"]
    command += [
        f"--junitxml={junit}",
        f"--session-timeout={seconds:g}",
        f"--rootdir={tests.parents[1]}",
        f"--hardware={hardware}",
    ]
    if args.device is not None:
        command.append(f"--device={args.device}")
    if args.ranks is not None:
        command.append(f"--ranks={args.ranks}")
    command += [f"--set={change}" for change in args.set]
    with subprocess.Popen(
        command,
        cwd=tests.parents[1],
        stdout=sys.stderr,
        start_new_session=True,
        env=os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},  # Megatron asks for it
    ) as process:
        try:
            code = process.wait(seconds + _GRACE)
        except subprocess.TimeoutExpired:
            late = f"pytest did not end within {args.minutes:g} + 1 minutes"
            return -signal.SIGKILL, late
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks too, if any outlive it
    if code < 0:
        return code, f"pytest was ended by signal {-code}"
    return code, "" if code in (0, 1) else f"pytest ended with status {code}"


def _report(
    environment: dict[str, str], checks: list[Check], folder: Path, args: Namespace
) -> int:
    report = as_markdown(environment, checks)
    everything = as_json(environment, checks)
    write_text(folder / REPORT, report)
    write_text(folder / NAME, json.dumps(everything, indent=1) + "\n")
    write_json(args.json, everything)
    print(as_text(checks))
    show(f"the report, to attach to an issue: {folder / REPORT}")
    for check in checks:
        texts = {test.text for test in check.tests}
        if check.verdict == "FAILED" or NO_TIME in texts:
            return 1
    return 0


def _folder(folder: Path) -> Path:
    """The folder, made if it is not there; a ValueError where it cannot be."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}") from None
    require_writable("FOLDER", folder / NAME)
    return folder.resolve()


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(_PROGRAM, _DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    text = f"where all files go ({_FOLDER})"
    add("folder", nargs="?", type=Path, default=_FOLDER, metavar="FOLDER", help=text)
    text = "ranks (default: one for each GPU; 2 without one)"
    add("--ranks", type=count(most=64), metavar="N", help=text)
    text = (
        "cpu runs ranks over gloo, also where there are GPUs (default: cuda "
        "where it is)"
    )
    add("--device", choices=["cuda", "cpu"], help=text)
    minutes = up_to(10_000, least=0.01)
    text = "after which no other test starts (%(default)s)"
    add("--minutes", type=minutes, default=15, metavar="N", help=text)
    add("--only", nargs="+", metavar="NAME", help="only tests/gpu/test_gpu_NAME.py")
    text = "hardware of the predicted times, as for megatron-muon plan (%(default)s)"
    add("--hardware", default="h100", metavar="NAME|FILE", help=text)
    text = "another value of one of its constants; may be given several times"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    add_outputs(parser)
    return parser
