"""The tests of Megatron-LM's scripts over several checkouts, and what came out as a table.

`bash tests/versions.sh [--options] CHECKOUT [CHECKOUT ...] [-- pytest arguments]`. A row is a
checkout, a column what tests show; with --options a row is an option of Megatron-LM and a column a
checkout. Only what a test has shown gets in: "run" or "refused" where it passed, "FAILED", or "not
run" where it was skipped or its tests were left out, with the reasons below the table.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS.parent))

from megatron_muon.megatron_lm.launch import version_of  # noqa: E402 after the path is set

FILES = [f"pretrain/test_pretrain{name}.py" for name in ("", "_cpu", "_oracle")]
FILES += [f"checkpoints/test_pretrain{name}.py" for name in ("_saved", "_resume")]
OPTIONS = ["pretrain/test_pretrain_options.py"]
# Column, and the tests that it stands for: the start of a test's name.
COLUMNS = {
    "TP2": "test_muon_trains[tp2]",
    "TP2 PP2 DP2 SP, overlaps": "test_muon_trains[tp2-pp2-dp2]",
    "MoE EP2": "test_muon_trains[ep2]",
    "AdamW": "test_adam_through_the_launcher",
    "a GPU's command line on a CPU": "test_a_gpus_command_line_trains",
    "tokenised file": "test_muon_trains_on_a_tokenised_file",
    "3 steps = oracle": "test_three_steps_equal_the_oracles",
    "wrong flags": "test_wrong_flags",
    "YAML refused": "test_a_yaml_file",
    "mixed refused": "test_a_core_from_elsewhere",
    "saved arguments": "test_saved_arguments",
    "tools/checkpoint": "test_the_saver_of_tools",
    "--use-checkpoint-args": "test_use_checkpoint_args",
    "killed and resumed, torch": "test_a_killed_run_goes_on_bit_for_bit[tp2-torch]",
    "killed and resumed, torch_dist": "test_a_killed_run_goes_on_bit_for_bit[tp2-torch_dist]",
    "gpt --help": "test_a_script_is_imported_and_its_help_has_the_flags[pretrain_gpt.py]",
    "mamba --help": "test_a_script_is_imported_and_its_help_has_the_flags[pretrain_mamba.py]",
    "hybrid --help": "test_a_script_is_imported_and_its_help_has_the_flags[pretrain_hybrid.py]",
    "vlm --help": "test_a_script_is_imported_and_its_help_has_the_flags[pretrain_vlm.py]",
}


def main(argv: Sequence[str]) -> int:
    """Print the table; the status is 1 where a test failed."""
    of_options = "--options" in argv
    checkouts, more = split([word for word in argv if word != "--options"])
    if not checkouts:
        print(__doc__, file=sys.stderr)
        return 2
    files = OPTIONS if of_options else FILES
    rows = {name_of(path): outcomes(path, files, more) for path in checkouts}
    print("\n".join(table_of_options(rows) if of_options else table(rows)))
    return int(any("FAILED" in cell for row in rows.values() for cell, _ in row.values()))


def split(argv: Sequence[str]) -> tuple[list[Path], list[str]]:
    words = list(argv)
    if "--" not in words:
        return [Path(word).resolve() for word in words], []
    cut = words.index("--")
    return [Path(word).resolve() for word in words[:cut]], words[cut + 1 :]


def name_of(checkout: Path) -> str:
    return f"{checkout.name} (core {version_of(checkout / 'megatron' / 'core')})"


def outcomes(
    checkout: Path, files: Sequence[str], more: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """By test: "run", "FAILED" or "not run", and a reason."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *more]
        command += [str(TESTS / "megatron_lm" / name) for name in files]
        env = {**os.environ, "MEGATRON_LM_PATH": str(checkout)}
        subprocess.run(command, env=env, stdout=sys.stderr, check=False)
        if not report.is_file():
            raise SystemExit(f"pytest made no report for {checkout}; see above")
        return {case.get("name", ""): outcome(case) for case in xml.parse(report).iter("testcase")}


def outcome(case: xml.Element) -> tuple[str, str]:
    for child in case:
        if child.tag in ("failure", "error"):
            return "FAILED", child.get("message", "").splitlines()[0][:120]
        if child.tag == "skipped":
            return "not run", child.get("message", "")
    for value in case.iter("property"):
        if value.get("name") == "cell":
            return str(value.get("value")), ""
    return "run", ""


Cell = tuple[str, str]


def drawn(
    title: str, down: Iterable[str], across: Sequence[str], cell: Callable[[str, str], Cell]
) -> list[str]:
    """A table, and below it a note of each cell that has a reason."""
    lines = [f"| {title} | {' | '.join(across)} |", f"|---{'|---' * len(across)}|"]
    notes: list[str] = []
    for name in down:
        cells = {column: cell(name, column) for column in across}
        notes += [f"- {name}, {at}: {text}, {why}" for at, (text, why) in cells.items() if why]
        lines.append(f"| {name} | {' | '.join(text for text, _ in cells.values())} |")
    return [*lines, "", *notes]


def table(rows: dict[str, dict[str, Cell]]) -> list[str]:
    def cell(name: str, column: str) -> Cell:
        row = rows[name]
        return worst([row[test] for test in row if test.startswith(COLUMNS[column])])

    return drawn("Megatron-LM", rows, list(COLUMNS), cell)


def table_of_options(rows: dict[str, dict[str, Cell]]) -> list[str]:
    by_name = {name.split(" (")[0]: row for name, row in rows.items()}
    tests = dict.fromkeys(test for row in rows.values() for test in row)
    options = {test.split("[", 1)[1].removesuffix("]"): test for test in tests}

    def cell(option: str, name: str) -> Cell:
        text, why = by_name[name].get(options[option], ("not run", "left out"))
        return ("–", "") if "has no --" in why else (text, why)

    return drawn("option", options, list(by_name), cell)


def worst(cells: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Of the tests of a column."""
    for text in ("FAILED", "not run"):
        for cell in cells:
            if cell[0] == text:
                return cell
    return cells[0] if cells else ("not run", "left out")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
