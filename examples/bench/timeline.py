"""Draw what a rank does in an optimizer step, and what is on the wire meanwhile.

    python timeline.py TRACE.json OUT.png

TRACE.json is a Chrome trace of ``megatron-muon bench step --traces FOLDER``, of any row.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Lane, and the name of its spans in a trace.
WORK = {
    "momentum": "muon/momentum",
    "AdamW": "muon/adamw",
    "Newton-Schulz": "muon/newton_schulz",
    "update": "muon/update",
}
# A collective has two spans: NAME/collective where it starts, NAME/wait where a rank waits for it.
TRAVELS = {
    "gather on the wire": "muon/gather",
    "scatter on the wire": "muon/scatter",
    "DP gather on the wire": "muon/dp_gather",
    "TP gather on the wire": "muon/tp_gather",
    "parameters on the wire": "params/gather",
}
_OPTIMIZER = "Optimizer.step#"  # torch's name of a step, in rows without phases
Spans = list[tuple[float, float]]  # (begin, length) in ms


def lanes(events: Sequence[dict[str, Any]]) -> dict[str, Spans]:
    """The lanes that the row has, in ms from the start of the first span.

    Args:
        events: ``traceEvents`` of a Chrome trace.

    Raises:
        ValueError: no event belongs to an optimizer step.
    """
    spans = _spans(events)
    present = {lane: spans[name] for lane, name in WORK.items() if name in spans}
    if not present:  # AdamW's row, and Megatron's own Muon's
        present = {
            name.removeprefix(_OPTIMIZER): own
            for name, own in spans.items()
            if name.startswith(_OPTIMIZER)
        }
    for lane, name in TRAVELS.items():
        if own := _under_way(spans.get(f"{name}/collective", []), spans.get(f"{name}/wait", [])):
            present[lane] = own
    if not present:
        raise ValueError("there is no step of an optimizer in it")
    begin = min(at for own in present.values() for at, _ in own)
    return {lane: [(at - begin, length) for at, length in own] for lane, own in present.items()}


def _spans(events: Sequence[dict[str, Any]]) -> dict[str, Spans]:
    """The spans of each name, in ms, in the order in which they start."""
    spans: dict[str, Spans] = {}
    for event in sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"]):
        spans.setdefault(event["name"], []).append((event["ts"] / 1e3, event["dur"] / 1e3))
    return spans


def _under_way(starts: Spans, waits: Spans) -> Spans:
    """Each collective from its start to the end of its wait; one that blocks has no wait."""
    if len(waits) != len(starts):
        return starts
    return [
        (start, wait + length - start)
        for (start, _), (wait, length) in zip(starts, waits, strict=True)
    ]


def draw(present: dict[str, Spans], title: str, out: Path) -> None:
    """A row of bars for each lane.

    Args:
        present: as ``lanes`` returns them.
        title: above the picture.
        out: its suffix says which format.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (10, 0.8 + 0.3 * len(present))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    for row, (name, spans) in enumerate(present.items()):
        axes.broken_barh(spans, (row - 0.4, 0.8), color="C7" if name in TRAVELS else f"C{row}")
    axes.set_yticks(range(len(present)), list(present))
    axes.invert_yaxis()
    axes.set_xlabel("ms of the step, one rank")
    axes.set_title(title)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def _title(trace: Path) -> str:
    name = trace.name.partition(".")[0]
    return f"{trace.resolve().parent.name}, {name}" if name.startswith("rank") else name


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "trace",
        metavar="TRACE.json",
        type=Path,
        help="a trace of megatron-muon bench step --traces, of any row; may end in .gz",
    )
    parser.add_argument("out", metavar="OUT.png", type=Path, help="or .svg, .pdf")
    given = parser.parse_args(argv)
    if not given.out.resolve().parent.is_dir():
        parser.error(f"{given.out}: there is no folder {given.out.parent}")
    try:
        whole = given.trace.read_bytes()
        text = gzip.decompress(whole) if given.trace.suffix == ".gz" else whole
        present = lanes(json.loads(text)["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        parser.error(f"{given.trace} is no trace of a step: {error!r}")
    try:
        draw(present, _title(given.trace), given.out)
    except ImportError:
        parser.error("pictures need matplotlib: pip install matplotlib")
    except ValueError as error:
        parser.error(f"{given.out}: {error}")


if __name__ == "__main__":
    main()
