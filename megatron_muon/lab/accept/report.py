"""The report in Markdown: environment, checks, figures, and what corrects the time
model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_muon.lab.accept.results import Check, Figure
from megatron_muon.lab.tables import digits, markdown, wrapped

# of the bench, by preset
ROWS = {"safe": "muon-contiguous", "fast": "muon-contiguous-auto"}
STEP = "optimizer step: "  # and the row, a figure's name
_LINES = 25  # of a failed test's account
_FASTER = 1.02  # by which ``fast`` must be, to be taken
# the checks for a preset; without a GPU a part is not run
_SPEAK = ("bits", "step", "training")


def as_json(environment: Mapping[str, str], checks: Sequence[Check]) -> dict[str, Any]:
    """Environment, and every test with its verdict and figures."""
    rows = [{"verdict": check.verdict, **dataclasses.asdict(check)} for check in checks]
    return {"environment": dict(environment), "checks": rows}


def as_markdown(environment: Mapping[str, str], checks: Sequence[Check]) -> str:
    """The whole report; ``environment`` has names and values."""
    lines = ["# megatron-muon accept", "", verdict(checks), "", recommended(checks), ""]
    lines += ["## Environment", "", *markdown(("", ""), list(environment.items())), ""]
    lines += ["## Checks", "", *_checks(checks), ""]
    lines += ["## Figures", "", *_figures(checks), ""]
    lines += ["## Not as predicted", "", *_wrong(checks), ""]
    lines += _logs(checks)
    return "\n".join(lines).rstrip() + "\n"


def as_text(checks: Sequence[Check]) -> str:
    """The verdict, the recommendation and what was not as predicted, for a terminal."""
    texts = [verdict(checks), recommended(checks), *_wrong(checks)]
    return "\n".join(itertools.chain(*map(wrapped, texts))).replace("**", "")


def verdict(checks: Sequence[Check]) -> str:
    """One sentence on all checks."""
    bad = [check.name for check in checks if check.verdict == "FAILED"]
    missing = [check.name for check in checks if check.verdict == "not run"]
    partly = [check.name for check in checks if check.verdict == "ok" and check.missing]
    sentences = ["No check failed."]
    if bad:
        sentences = [f"**FAILED: {', '.join(bad)}.**"]
    if missing:
        sentences.append(f"Not run: {', '.join(missing)}.")
    if partly:
        sentences.append(f"Run in part: {', '.join(partly)}.")
    return " ".join(sentences)


def recommended(checks: Sequence[Check]) -> str:
    """The preset that the results speak for, and by what."""
    times = {figure.name: figure.measured for figure in figures_of(checks)}
    safe, fast = (times.get(f"{STEP}{ROWS[preset]}") for preset in ("safe", "fast"))
    whole = {
        check.name for check in checks if check.verdict == "ok" and not check.missing
    }
    has_failed = any(check.verdict == "FAILED" for check in checks)
    if safe is None or fast is None or has_failed or not whole.issuperset(_SPEAK):
        needed = ", ".join(_SPEAK)
        return (
            f"Recommended: `--muon-preset safe`, the default, until {needed} are "
            "ok on a GPU."
        )
    name = "fast" if safe >= _FASTER * fast else "safe"
    text = (
        f"a step takes {digits(fast)} ms with fast, {digits(safe)} ms with safe, "
        "and both learn"
    )
    return f"Recommended here: `--muon-preset {name}`: {text}."


def _checks(checks: Sequence[Check]) -> Iterator[str]:
    rows: list[tuple[str, str, str]] = []
    for check in checks:
        word: str = check.verdict
        if word == "ok" and check.missing:
            word = f"ok; {check.missing} of {len(check.tests)} not run"
        rows.append((f"**{check.name}**", word, f"{check.seconds:.0f} s"))
        bold = {"FAILED": "**FAILED**"}
        for test in check.tests:
            rows.append(
                (f"· {test.name}", bold.get(test.verdict, test.verdict), test.text)
            )
    yield from markdown(("check", "verdict", "what was looked at, or why not"), rows)


def _figures(checks: Sequence[Check]) -> Iterator[str]:
    rows = []
    for check in checks:
        for figure in figures_of([check]):
            ratio = "" if figure.ratio is None else digits(figure.ratio)
            values = (in_few_digits(figure.predicted), in_few_digits(figure.measured))
            rows.append((check.name, figure.name, figure.unit, *values, ratio))
    if not rows:
        yield "None."
        return
    yield from markdown(
        ("check", "figure", "unit", "predicted", "measured", "ratio"), rows
    )


def figures_of(checks: Sequence[Check]) -> list[Figure]:
    """All figures, in order."""
    tests = itertools.chain(*(check.tests for check in checks))
    return list(itertools.chain(*(test.figures for test in tests)))


def wrong(figures: Sequence[Figure]) -> list[Figure]:
    """Figures with both values that are not as predicted."""
    return [
        figure for figure in figures if figure.is_compared and not figure.as_predicted
    ]


def _wrong(checks: Sequence[Check]) -> Iterator[str]:
    figures = figures_of(checks)
    mispredicted = wrong(figures)
    compared = sum(figure.is_compared for figure in figures)
    if not mispredicted:
        yield (
            f"Nothing: {compared} figures were predicted and measured, and are as "
            "predicted."
        )
        return
    yield from (f"- {_correction(figure)}" for figure in mispredicted)
    settings = corrections(mispredicted)
    if settings:
        flags = " ".join(
            f"--set {name}={digits(value, 4)}" for name, value in settings.items()
        )
        yield ""
        yield (
            "The time model with these values: `megatron-muon plan FLAGS… "
            + flags
            + "`"
        )


def corrections(figures: Sequence[Figure]) -> dict[str, float]:
    """Values to set, by constant; the first figure that gives one for a constant
    counts.
    """
    values: dict[str, float] = {}
    for figure in figures:
        if figure.constant and figure.value is not None:
            values.setdefault(figure.constant, figure.value)
    return values


def _correction(figure: Figure) -> str:
    ratio = "" if figure.ratio is None else f", {digits(figure.ratio)} times as much"
    predicted = in_few_digits(figure.predicted)
    measured = in_few_digits(figure.measured)
    text = (
        f"{figure.name}: predicted {predicted} {figure.unit}, measured {measured} "
        f"{figure.unit}{ratio}."
    )
    if figure.constant and figure.value is not None:
        text += f" Corrects `{figure.constant}`: set it to {digits(figure.value, 4)}."
    elif figure.constant:
        text += f" Corrects `{figure.constant}`, whose value this does not give."
    if figure.corrects:
        text += f" {figure.corrects}"
    return text


def in_few_digits(value: float | None) -> str:
    """A number in few digits; integers in full."""
    if value is None:
        return ""
    return f"{value:,.0f}" if float(value).is_integer() else digits(value, 4)


def _logs(checks: Sequence[Check]) -> Iterator[str]:
    for check in checks:
        for test in check.tests:
            if test.log:
                fence = "`" * 4
                lines = test.log.replace(fence, "'").splitlines()[-_LINES:]
                yield f"## Failure of {check.name}: {test.name}"
                yield from ("", fence, *(line[:300] for line in lines), fence, "")
