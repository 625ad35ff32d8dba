"""A run's records as text: the last step by kind of matrix, the layers' outputs, the warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from megatron_muon.lab.watch.history import History
from megatron_muon.lab.watch.kinds import by_kind
from megatron_muon.lab.watch.rules import Warning

PAGE = "docs/troubleshooting.md"
# Number, heading, and the start record's number that divides it.
_COLUMNS = (
    ("update_rms", "update/promised", "promised"),
    ("weight_rms", "weight RMS", ""),
    ("spectral_norm", "spectral norm", ""),
    ("momentum_norm", "momentum norm", ""),
    ("orthogonality_error", "orth. error", ""),
    ("cosine", "cosine", ""),
    ("effective_rank", "rank/full", "full_rank"),
)
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH, _MOST_LAYERS = 40, 200


def as_text(name: str, history: History, warnings: Sequence[Warning]) -> str:
    """The whole view."""
    if not history.steps:
        return "\n".join([f"{name}: no step yet", *damage_lines(history)])
    blocks = [_head(name, history), _matrices(history), _outputs(history)]
    blocks += [_logits(history), warning_lines(warnings), damage_lines(history)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def step_line(history: History) -> str:
    """The last step in one line, for an output that is no terminal."""
    last, start = history.steps[-1], history.start
    ratios = [
        history.values(("muon", row, "update_rms"))[-1] / promised
        for row, promised in start.promised.items()
        if promised
    ]
    outputs = [history.values(("layers", r, "output_rms"))[-1] for r in history.rows("layers")]
    words = [f"step {last.step}"]
    for label, values in (("update/promised", ratios), ("output RMS", outputs)):
        words += [f"{label} {_spread(values)}"] if any(map(math.isfinite, values)) else []
    return "; ".join(words)


def warning_lines(warnings: Sequence[Warning]) -> list[str]:
    """A line for each warning, with its place on the page."""
    return [f"warning: {each.text} ({PAGE}, {each.see!r})" for each in warnings]


def _head(name: str, history: History) -> list[str]:
    first, last, start = history.steps[0], history.steps[-1], history.start
    words = [f"{name}: steps {first.step} to {last.step}, {len(history.steps)} records"]
    words += [f"one of {history.stride} kept"] * (history.stride > 1)
    words += [f"{start.ranks} ranks"] * bool(start.ranks)
    if start.muon_share is not None:
        words.append(f"Muon has {start.muon_share:.1%} of the parameters")
    words += [f"lr {last.lr:g}"] if last.lr is not None else []
    lines = [", ".join(words)]
    if last.times is not None:
        times = last.times
        lines.append(
            f"Newton-Schulz: {times.mean:.3g} ms on the mean rank, {times.max:.3g} ms on rank "
            f"{times.rank}"
        )
    return lines


def _matrices(history: History) -> list[str]:
    cells = [["matrices", *(heading for _, heading, _ in _COLUMNS)]]
    for kind, rows in by_kind(_present(history, "muon")).items():
        cells.append([f"{kind} ({len(rows)})"])
        for name, _, divisor in _COLUMNS:
            divisors = getattr(history.start, divisor) if divisor else {}
            values = [
                history.values(("muon", row, name))[-1] / (divisors.get(row) or 1.0)
                for _, row in rows
            ]
            cells[-1].append(_spread(values))
    return ["median over layers, least to most", *_aligned(cells)] * (len(cells) > 1)


def _outputs(history: History) -> list[str]:
    cells = [["output RMS of", "now", "by step"]]
    for row in history.rows("layers")[:_MOST_LAYERS]:
        values = history.values(("layers", row, "output_rms"))
        cells.append([row, _number(values[-1]), _bars(values)])
    return _aligned(cells) * (len(cells) > 1)


def _logits(history: History) -> list[str]:
    cells = [["largest logit of", "now", "by step"]]
    for row in history.rows("logits")[:_MOST_LAYERS]:
        values = history.values(("logits", row, "max_logit"))
        cells.append([row, _number(values[-1]), _bars(values)])
    return _aligned(cells) * (len(cells) > 1)


def _present(history: History, kind: str) -> list[str]:
    """The rows of the last step: after a restart under other splits, earlier ones are gone."""
    last = history.steps[-1].numbers
    present = {
        row
        for (of, row, _), at in history.columns.items()
        if of == kind and at < len(last) and not math.isnan(last[at])
    }
    return [row for row in history.rows(kind) if row in present]


def damage_lines(history: History) -> list[str]:
    """A line for each damaged line of the file; the first ones, and the number of the others."""
    lines = [f"damaged: line {fault.line}: {fault.why}" for fault in history.faults]
    more = history.fault_count - len(lines)
    return [*lines, f"damaged: {more} more lines"] if more else lines


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    ]


def _spread(values: Sequence[float]) -> str:
    """The median, and the least and most where there are several."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "-"
    middle = _number(median(known))
    if len(known) == 1:
        return middle
    return f"{middle} {_number(min(known))}..{_number(max(known))}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else "not finite" if math.isinf(value) else f"{value:.3g}"


def _bars(values: Sequence[float]) -> str:
    """The course of a number in at most ``_WIDTH`` characters, from 0 to its largest value."""
    step = max(1, -(-len(values) // _WIDTH))
    shown = values[::-1][::step][::-1]  # the last one is among them
    most = max((value for value in shown if math.isfinite(value)), default=0.0)
    top = len(_BARS) - 1
    return "".join(
        _BARS[max(0, min(top, int(value / most * top)))] if math.isfinite(value) and most else " "
        for value in shown
    )
