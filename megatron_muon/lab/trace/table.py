"""The tables of ``megatron-muon trace report``, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_muon.files.printable import printable
from megatron_muon.lab.traces.measure import KindTimes, RankTimes, RunTimes

TIMES = (
    ("step", "step_ms"),
    ("compute", "compute_ms"),
    ("communication", "communication_ms"),
    ("  overlapped", "overlapped_ms"),
    ("  exposed", "exposed_ms"),
    ("idle", "idle_ms"),
    ("optimizer", "optimizer_ms"),
)
Rows = list[list[str]]


def as_text(runs: Sequence[RunTimes]) -> str:
    """All tables: each run's ranks and collectives, then the runs side by side."""
    blocks = []
    for run in runs:
        blocks += [_title(run), aligned(_ranks(run)), aligned(_kinds(run))]
    if len(runs) > 1:
        blocks += ["side by side, means over ranks; in brackets over the first", _beside(runs)]
    return "\n\n".join(blocks)


def as_json(runs: Sequence[RunTimes]) -> dict[str, Any]:
    """The same for programs: every figure of every rank, and the ratios to the first run."""
    return {
        "runs": [
            {
                "name": run.name,
                "ranks": [asdict(rank) for rank in run.ranks],
                "mean": {field: run.mean(field) for _, field in TIMES},
                "imbalance": {field: run.imbalance(field) for _, field in TIMES[:2]},
                "collectives": [asdict(kind) for kind in run.kinds.values()],
            }
            for run in runs
        ],
        "ratios": [
            {field: _ratio(run.mean(field), runs[0].mean(field)) for _, field in TIMES}
            for run in runs[1:]
        ],
    }


def aligned(rows: Rows) -> str:
    """Rows with columns of one width; the first to the left, the others to the right."""
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in shown
    )


def _title(run: RunTimes) -> str:
    steps = {rank.steps for rank in run.ranks}
    said = "no marks of steps: the whole trace is taken as one" if 0 in steps else ""
    counts = " to ".join(str(count) for count in sorted({min(steps), max(steps)}))
    said = said or f"mean of {counts} step{'s' if max(steps) > 1 else ''}"
    device = "/".join(sorted({rank.device.upper() for rank in run.ranks}))
    ranks = f"{len(run.ranks)} rank{'s' if len(run.ranks) > 1 else ''}"
    return f"{printable(run.name)}: {ranks}, {device}, {said}"


def _ranks(run: RunTimes) -> Rows:
    rows = [["ms of a step", *(label.strip() for label, _ in TIMES), "optimizer share"]]
    rows += [[f"rank {rank.rank}", *_cells(rank)] for rank in run.ranks]
    if len(run.ranks) > 1:
        rows.append(
            ["mean", *(_number(run.mean(field)) for _, field in TIMES), _percent(_share(run))]
        )
        worst = [_number(run.imbalance(field)) for _, field in TIMES[:2]]
        rows.append(["largest / mean", *worst, *[""] * (len(TIMES) - 1)])
    return rows


def _cells(rank: RankTimes) -> list[str]:
    share = _ratio(rank.optimizer_ms, rank.step_ms)
    return [*(_number(getattr(rank, field)) for _, field in TIMES), _percent(share)]


def _share(run: RunTimes) -> float | None:
    return _ratio(run.mean("optimizer_ms"), run.mean("step_ms"))


def _kinds(run: RunTimes) -> Rows:
    heads = ["collectives, mean over ranks", "count", "ms", "exposed", "MB", "GB/s", "bus GB/s"]
    return [heads, *([name, *_kind(kind)] for name, kind in run.kinds.items())]


def _kind(kind: KindTimes) -> list[str]:
    size = None if kind.bytes is None else kind.bytes / 1e6
    return [
        f"{kind.count:.3g}",
        *map(_number, (kind.ms, kind.exposed_ms, size, kind.gbytes, kind.bus_gbytes)),
    ]


def _beside(runs: Sequence[RunTimes]) -> str:
    rows = [["ms of a step", *(run.name for run in runs)]]
    for label, field in TIMES:
        rows.append([label, *_compared([run.mean(field) for run in runs])])
    rows.append(["optimizer share", *map(_percent, map(_share, runs))])
    rows.append(["compute, largest / mean", *(_number(r.imbalance("compute_ms")) for r in runs)])
    every = {name: None for run in runs for name in run.kinds}
    for title, field, unit in (
        ("ms in ", "ms", 1.0),
        ("exposed ms in ", "exposed_ms", 1.0),
        ("MB in ", "bytes", 1e-6),
    ):
        for name in every:
            means = [getattr(r.kinds[name], field) if name in r.kinds else 0.0 for r in runs]
            values = [None if value is None else value * unit for value in means]
            rows.append([f"{title}{name}", *_compared(values)])
    return aligned(rows)


def _compared(values: Sequence[float | None]) -> list[str]:
    cells = [_number(values[0])]
    for value in values[1:]:
        ratio = _ratio(value, values[0])
        cells.append(_number(value) + ("" if ratio is None else f" ({ratio:.2f})"))
    return cells


def _ratio(value: float | None, first: float | None) -> float | None:
    return value / first if value is not None and first else None


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1:
        return f"{value:.3g}"
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
