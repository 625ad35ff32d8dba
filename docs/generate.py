"""Write what follows from the rows of settings: ``python docs/generate.py``, or
``--check`` it.

These are two pages and, in the docstring of ``MuonConfig``, the sentence of each field.
They are in the clone, so that they can be read without building anything; a test and
``docs/build.sh`` hold them to the code.
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


from megatron_muon.settings.coefficients import (  # noqa: E402 after the path is set
    GRAM_ERROR,
    GRAM_LEAST,
    GRAM_TOP,
    SETS,
    CoefficientSet,
)
from megatron_muon.settings.config import ROWS, MuonConfig  # noqa: E402
from megatron_muon.settings.rows import Flag, Row  # noqa: E402
from megatron_muon.settings.run_flags import RUN_ROWS  # noqa: E402

WRITTEN = "<!-- Written by docs/generate.py from {source}; change that. -->\n\n"


# Groups of flags, by words in their names; the first group with one has the flag.
GROUPS = {
    "Megatron's own Muon": (
        "defaults",
        "backend",
        "tp-mode",
        "scalar",
        "syrk",
        "matmul-prec",
    ),
    "Checkpoints": ("adamw-from", "from-adamw", "digest"),
    "Logs, traces, CPUs": ("log-", "trace-", "nonfinite", "cpu"),
    "Work and messages": (
        "split-matrices",
        "homes",
        "rank",
        "link",
        "round",
        "layout",
        "gather",
    ),
    "Which weights, which matrices": ("split", "include", "exclude"),
    "Newton-Schulz": ("ns-", "coefficient", "preset", "elementwise"),
    "Rate, momentum, decay and clips": ("",),
}


def flags_page() -> str:
    """Every flag of Muon's: its values, the setting that it is, its help."""
    groups: dict[str, list[str]] = {name: [] for name in reversed(GROUPS)}
    for row in (*ROWS.values(), *RUN_ROWS):
        for flag, setting in _settings(row):
            groups[_group(flag.option)].append(
                f"### `{flag.option}`\n\n"
                f"{_values(flag)}{f'; in Python {setting}' if setting else ''}\n\n"
                f"{_cell(flag.help)}\n\n"
            )
    page = WRITTEN.format(source="the table of flags") + (
        "# Flags\n\n"
        "Every flag that the plugin adds to Megatron-LM's command line, as `--help` "
        "explains it, "
        "with its values and the field of [`MuonConfig`](usage.md#settings) that it "
        "sets.\n\n"
        "A flag of the proof of concept or of Megatron's own Muon means here what it "
        "means there. "
        "Where it cannot, it is an error that says why. A flag says where it has no "
        "effect.\n\n"
    )
    page += "".join(f"## {name}\n\n{''.join(parts)}" for name, parts in groups.items())
    return page.rstrip("\n") + "\n"


def _group(option: str) -> str:
    return next(
        name for name, words in GROUPS.items() if any(word in option for word in words)
    )


def coefficients_page() -> str:
    """Every published coefficient set: its source, interval, restarts and numbers."""
    least = ", ".join(
        f"2^{math.log2(it):g} ({dtype})" for dtype, it in GRAM_LEAST.items()
    )
    parts = [
        WRITTEN.format(source="the module coefficients"),
        "# Coefficients\n\n"
        "The published sets for `--muon-ns-coefficients` and "
        "`MuonConfig(ns_coefficients=…)`. One "
        "Newton-Schulz step is X ← aX + (bA + cA²)X with A = XXᵀ. It takes a singular "
        "value σ to "
        "aσ + bσ³ + cσ⁵.\n\n"
        "The given number of steps brings singular values in *interval*, of a matrix "
        "with "
        "Frobenius norm 1, into *band*. *Beyond* names the coefficients of further "
        "steps. *gram* "
        "lists the numbers of steps with known, accurate restarts of the Gram "
        "iteration in each "
        "dtype. With any other combination `gram` is an error, and `auto` uses "
        "`standard` and says "
        "so at the start.\n\n"
        "Restarts were chosen on 10,000 drawn matrices, rounded as GPUs and CPUs do "
        "(`tests/figures/restart_errors.py`). On each of them two bounds hold, also if "
        "a GPU adds "
        "parts of sums in 16 bits:\n\n"
        "- The Gram iteration's error, relative to the exact result in Frobenius norm, "
        "is at most "
        f"{GRAM_ERROR:g} times the standard iteration's in the same dtype, or "
        f"{GRAM_ERROR:g} times "
        f"{least} if that is larger.\n"
        f"- Its largest singular value is at most {GRAM_TOP} times the larger of "
        "standard's and "
        "the exact one's.\n\n",
        _table(
            [
                "set",
                "steps",
                "interval",
                "band",
                "beyond",
                "gram, bf16",
                "fp16",
                "fp32",
            ],
            [_set_row(name, coefficients) for name, coefficients in SETS.items()],
        ),
        "\nYour own numbers: `--muon-ns-coefficients 'a,b,c'` for every step, or "
        "`'a,b,c;a,b,c;…'` one after the other; in Python a tuple of three numbers, or "
        "a tuple of "
        f"such. Numbers with which a step may overflow are an error. The default is "
        f"`{MuonConfig().ns_coefficients}`, with {MuonConfig().ns_steps} steps as all "
        "sets but "
        "`deepseekv4`; the start of a run says where a set is made for another "
        "number.\n",
    ]
    for name, coefficients in SETS.items():
        rows = [
            [str(step), *map(repr, triple)]
            for step, triple in enumerate(coefficients.triples, 1)
        ]
        parts.append(f"\n## {name}\n\nSource: {_linked(coefficients.source)}.\n\n")
        if coefficients.fewest > 1:
            parts.append(
                f"Fewer than {coefficients.fewest} steps are an error, which says what "
                "they would "
                "be: the first eight are `simple`'s.\n\n"
            )
        parts.append(_table(["step", "a", "b", "c"], rows))
    return "".join(parts)


# Fields that have another unit, or other values, than their flags.
AS_FIELD = {
    "round_bytes": {"in MiB": "in bytes"},
    "ns_dtype": {"auto:": "None:"},
    "ns_batch": {"auto:": "None:"},
}


def sentence_of(row: Row) -> str:
    """What a field of ``MuonConfig`` is: the first sentence of its flag's help.

    Explained values, as in ``auto: by shape.``, belong to it.
    """
    flag = row.flags[0]
    text = re.split(r"(?<!eq)\. (?![\w-]+:)", flag.says)[0].rstrip(".") + "."
    for words, of_field in AS_FIELD.get(row.field, {}).items():
        text = text.replace(words, of_field)
    for other in ROWS.values():
        for option in (each.option for each in other.flags):
            text = re.sub(rf"{option}(?![\w-])", other.field, text)
    text = text.replace(" flags.", " settings.")
    turns_off = flag.is_switch and row.default is True
    return f"False: {text[0].lower()}{text[1:]}" if turns_off else text


def config_module() -> str:
    """The module of ``MuonConfig``, with a sentence for each field in its docstring."""
    text = (ROOT / CONFIG).read_text()
    head, raises = "    Attributes:\n", "\n    Raises:\n        TypeError: a setting"
    before, _, rest = text.partition(head)
    _, _, after = rest.partition(raises)
    lines = [
        textwrap.fill(
            f"{row.field}: {sentence_of(row)} Default: {row.default!r}.",
            width=88,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for row in ROWS.values()
    ]
    return "".join([before, head, "\n".join(lines), "\n", raises, after])


CONFIG = "megatron_muon/settings/config.py"
PAGES = {
    "docs/flags.md": flags_page,
    "docs/coefficients.md": coefficients_page,
    CONFIG: config_module,
}


def stale() -> list[str]:
    """The pages that are not what the code says."""
    return [
        name
        for name, page in PAGES.items()
        if not (ROOT / name).exists() or (ROOT / name).read_text() != page()
    ]


def _values(flag: Flag) -> str:
    if flag.kind.choices:
        return ", ".join(f"`{choice}`" for choice in flag.kind.choices)
    if flag.is_switch:
        return "switch"
    named = {int: "whole number", float: "number"}.get(flag.kind.type)
    return named or (flag.kind.metavar or "name").lower().replace("|", " or ")


def _settings(row: Row) -> Iterator[tuple[Flag, str]]:
    """The flags of a row, each with the setting where messages name it by that flag."""
    for flag in row.flags:
        yield (
            flag,
            f"`{row.field}={row.default!r}`" if f"({flag.option})" in row.named else "",
        )


def _set_row(name: str, coefficients: CoefficientSet) -> list[str]:
    after = {
        "cycle": "from the start",
        "repeat_last": "the last again",
    }
    grams = [
        ", ".join(
            str(steps)
            for steps, at in coefficients.restarts.items()
            if getattr(at, dtype) is not None
        )
        for dtype in ("bf16", "fp16", "fp32")
    ]
    return [
        f"[`{name}`](#{name})",
        str(coefficients.steps),
        f"{coefficients.interval[0]:g} to {coefficients.interval[1]:g}",
        f"{coefficients.band[0]:g} to {coefficients.band[1]:g}",
        after[coefficients.after],
        *grams,
    ]


def _linked(source: str) -> str:
    return re.sub(r"https://[^\s;]+", r"<\g<0>>", source)


def _cell(text: str) -> str:
    """Text that a page shows as it is, but for links to other pages."""
    text = re.sub(
        r"docs/(\w+)\.md",
        lambda page: f"[{page[1].replace('_', ' ')}]({page[1]}.md)",
        text,
    )
    return text.replace("*", r"\*").replace("<", "&lt;")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(arguments: list[str]) -> int:
    """Write the pages, or with ``--check`` only compare: 1 where one is stale."""
    if arguments == ["--check"]:
        if outdated := stale():
            print(f"{', '.join(outdated)} are stale: run python docs/generate.py")
        return int(bool(outdated))
    for name, page in PAGES.items():
        (ROOT / name).write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
