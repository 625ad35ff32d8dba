"""Chrome traces: events by hand, and a pair of runs of the quickstart in ``adamw`` and
``muon``.

The pair is of two ranks and one step, of `train.py @gpt.args --num-layers 3 --hidden-size 64
--ffn-hidden-size 136 --num-attention-heads 2 --seq-length 64 --micro-batch-size 4
--global-batch-size 8 --overlap-grad-reduce`, and of release 0.2.0, which wrote the same marks.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
PAIR = Path(__file__).parent
HOST, WORKER = 1, 2  # threads


def event(
    name: str, start: float, stop: float, category: str = "cpu_op", **more: Any
) -> Event:
    """An event from ``start`` to ``stop`` in microseconds, on the main thread."""
    times = {"ts": start, "dur": stop - start}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 7,
        "tid": HOST,
        **times,
        **more,
    }


def mark(name: str, start: float, stop: float) -> Event:
    return event(name, start, stop, "user_annotation")


def gloo(name: str, start: float, stop: float, elements: int | None = None) -> Event:
    """gloo's event, on its own thread; with the shape of an fp32 tensor if it was
    recorded.
    """
    args = (
        {}
        if elements is None
        else {"Input Dims": [[elements]], "Input type": ["float"]}
    )
    return event(f"gloo:{name}", start, stop, "user_annotation", tid=WORKER, args=args)


def kernel(name: str, start: float, stop: float, stream: int = 7, **args: Any) -> Event:
    """A kernel on a stream of GPU 0."""
    return event(
        name, start, stop, "kernel", pid=0, tid=stream, args={"stream": stream, **args}
    )


def nccl(collective: str, elements: int, ranks: int, dtype: str) -> dict[str, Any]:
    """Arguments of an NCCL kernel, as torch 2.2 and later write them."""
    return {
        "Collective name": collective,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "Group size": ranks,
        "dtype": dtype,
    }


def write(path: Path, events: Sequence[Event], **metadata: Any) -> Path:
    """Write a trace, compressed if the name ends in ``.gz``."""
    text = json.dumps(
        {"schemaVersion": 1, **metadata, "traceEvents": list(events)}
    ).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
