"""The report in Markdown: environment, checks, figures, and what corrects the time model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_muon.lab.accept.outcome import Figure, Finding, Outcome
from megatron_muon.lab.accept.table import CHECKS

_TITLES = {check.name: check.title for check in CHECKS}


def as_markdown(environment: Mapping[str, str], outcomes: Sequence[Outcome]) -> str:
    """The whole report.

    Args:
        environment: names and values.
        outcomes: of every check, in order.
    """
    lines = ["# megatron-muon accept", "", verdict(outcomes), ""]
    lines += ["## Environment", "", *_table(["", ""], environment.items()), ""]
    lines += ["## Checks", "", *_checks(outcomes), ""]
    lines += ["## Figures", "", *_figures(outcomes), ""]
    lines += ["## Not as predicted", "", *_wrong(outcomes), ""]
    lines += _logs(outcomes)
    return "\n".join(lines).rstrip() + "\n"


def verdict(outcomes: Sequence[Outcome]) -> str:
    """One sentence on all checks."""
    bad = [outcome.check for outcome in outcomes if outcome.verdict == "FAILED"]
    missing = [outcome.check for outcome in outcomes if outcome.verdict == "not run"]
    partly = [outcome.check for outcome in outcomes if outcome.verdict == "ok" and outcome.missing]
    said = [f"**FAILED: {', '.join(bad)}.**"] if bad else ["No check failed."]
    if missing:
        said.append(f"Not run: {', '.join(missing)}.")
    if partly:
        said.append(f"Run in part: {', '.join(partly)}.")
    return " ".join(said)


def _checks(outcomes: Sequence[Outcome]) -> Iterator[str]:
    rows = []
    for outcome in outcomes:
        said = _verdict_of(outcome)
        rows.append(
            (f"**{outcome.check}**: {_TITLES.get(outcome.check, '')}", said, _took(outcome))
        )
        rows += [(f"· {part.name}", _of_part(part), part.text) for part in outcome.parts]
    yield from _table(["check", "verdict", "what was looked at, or why not"], rows)


def _verdict_of(outcome: Outcome) -> str:
    if outcome.verdict == "ok" and outcome.missing:
        return f"ok; {outcome.missing} of {len(outcome.parts)} parts not run"
    return outcome.verdict


def _of_part(part: Finding) -> str:
    return f"**{part.verdict}**" if part.verdict == "FAILED" else part.verdict


def _took(outcome: Outcome) -> str:
    return f"{outcome.seconds:.0f} s" if outcome.seconds else ""


def _figures(outcomes: Sequence[Outcome]) -> Iterator[str]:
    rows = []
    for outcome in outcomes:
        for part in outcome.parts:
            for figure in part.figures:
                ratio = "" if figure.ratio is None else f"{figure.ratio:.3g}"
                values = (said(figure.predicted), said(figure.measured))
                rows.append((outcome.check, figure.name, figure.unit, *values, ratio))
    if not rows:
        yield "None."
        return
    yield from _table(["check", "figure", "unit", "predicted", "measured", "ratio"], rows)


def wrong(outcomes: Sequence[Outcome]) -> list[Figure]:
    """Figures with both values that are not as predicted."""
    figures = [figure for outcome in outcomes for part in outcome.parts for figure in part.figures]
    return [figure for figure in figures if figure.is_compared and not figure.as_predicted]


def _wrong(outcomes: Sequence[Outcome]) -> Iterator[str]:
    mispredicted = wrong(outcomes)
    compared = sum(
        figure.is_compared
        for outcome in outcomes
        for part in outcome.parts
        for figure in part.figures
    )
    if not compared:
        yield "Nothing was both predicted and measured."
        return
    if not mispredicted:
        yield f"Nothing: all {compared} figures that were predicted and measured are as predicted."
        return
    yield from (f"- {_correction(figure)}" for figure in mispredicted)
    settings = corrections(mispredicted)
    if settings:
        flags = " ".join(f"--set {name}={value:.4g}" for name, value in settings.items())
        yield ""
        yield "The time model with these values: `megatron-muon plan FLAGS… " + flags + "`"


def corrections(figures: Sequence[Figure]) -> dict[str, float]:
    """Values to set, by constant; the first figure that gives one for a constant counts."""
    values: dict[str, float] = {}
    for figure in figures:
        if figure.constant and figure.value is not None:
            values.setdefault(figure.constant, figure.value)
    return values


def _correction(figure: Figure) -> str:
    ratio = "" if figure.ratio is None else f", {figure.ratio:.3g} times as much"
    text = (
        f"{figure.name}: predicted {said(figure.predicted)} {figure.unit}, measured "
        f"{said(figure.measured)} {figure.unit}{ratio}."
    )
    if figure.constant and figure.value is not None:
        text += f" Corrects `{figure.constant}`: set it to {figure.value:.4g}."
    elif figure.constant:
        text += f" Corrects `{figure.constant}`, whose value this does not give."
    if figure.corrects:
        text += f" {figure.corrects}"
    return text


def said(value: float | None) -> str:
    """A number in few digits; integers in full."""
    if value is None:
        return ""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def _logs(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.verdict == "FAILED" and outcome.log:
            fence = "`" * 4
            yield f"## Output of {outcome.check}, its end"
            yield from ("", fence, *outcome.log.replace(fence, "'").splitlines(), fence, "")


def _table(heads: Sequence[str], rows: object) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|" + " --- |" * len(heads)
    for row in rows:  # type: ignore[attr-defined]
        yield f"| {' | '.join(_cell(cell) for cell in row)} |"


def _cell(text: str) -> str:
    """A text in one cell, in which nothing is HTML or another cell."""
    plain = " ".join(text.split()).replace("|", "\\|")
    return plain.replace("<", "&lt;").replace(">", "&gt;")
