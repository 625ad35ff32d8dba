"""Draw what a rank does in a step of Muon, and what is on the wire meanwhile.

    python timeline.py TRACE.json OUT.png

TRACE.json is a Chrome trace of ``megatron-muon bench step --traces FOLDER``.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Under way from where the collective is started until it has been waited for.
TRAVELS = {"gather on the wire": "muon/gather", "scatter on the wire": "muon/scatter"}
WORK = {
    "momentum": "muon/momentum",
    "AdamW": "muon/adamw",
    "Newton-Schulz": "muon/newton_schulz",
    "update": "muon/update",
}
Spans = list[tuple[float, float]]  # (begin, length) in ms


def lanes(events: list[dict[str, Any]]) -> dict[str, Spans]:
    """By lane, in ms from the step's first phase on."""
    spans: dict[str, Spans] = {}
    for event in sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"]):
        spans.setdefault(event["name"], []).append((event["ts"] / 1e3, event["dur"] / 1e3))
    begin = min(at for name, of in spans.items() if name.startswith("muon/") for at, _ in of)
    found = {}
    for lane, name in WORK.items():
        found[lane] = [(at - begin, length) for at, length in spans.get(name, [])]
    for lane, name in TRAVELS.items():
        starts, waits = spans.get(f"{name}/collective", []), spans.get(f"{name}/wait", [])
        found[lane] = [
            (start - begin, wait + length - start)
            for (start, _), (wait, length) in zip(starts, waits, strict=True)
        ]
    return found


def main(trace: Path, out: Path) -> None:
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    found = lanes(json.loads(text)["traceEvents"])
    figure, axes = plt.subplots(figsize=(10, 2.6), layout="constrained")
    names = list(found)
    for row, name in enumerate(names):
        axes.broken_barh(
            found[name], (row - 0.4, 0.8), color="C7" if name in TRAVELS else f"C{row}"
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms of the step, one rank")
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
