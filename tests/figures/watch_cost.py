"""What a logging step costs.

``cd tests && python -m figures.watch_cost [flags of the quickstart's train.py]``.

Two ranks train the quickstart's GPT, and every second step is a logging step. Printed are the
median milliseconds of both kinds of steps, in wall time and in processor time, and the share of the
run's time that logging takes where one step in 100 logs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support import ROOT

STEPS, WARM_UP, INTERVAL = 62, 2, 100
QUICKSTART = ROOT / "examples" / "quickstart"


def measured(flags: list[str], path: str) -> list[tuple[float, float]]:
    """On a rank: seconds and processor seconds of each step after the warm-up."""
    import torch.distributed as dist

    sys.path.insert(0, str(QUICKSTART))
    import train  # type: ignore[import-not-found]
    from arguments import parse  # type: ignore[import-not-found]
    from corpus import read_corpus  # type: ignore[import-not-found]
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from model import build_model  # type: ignore[import-not-found]

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    run = "--optimizer muon --lr 1e-2 --micro-batch-size 16 --muon-log-interval 2".split()
    args = parse([f"@{QUICKSTART}/gpt.args", *run, "--muon-log-file", path, *flags])
    data, _ = train.batches(args, read_corpus())
    model = build_model(args)
    optimizer, _ = train.build_optimizer(args, model)
    seconds = []
    for step in range(1, STEPS + 1):
        dist.barrier()
        start, processor = time.perf_counter(), time.process_time()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        train.run_step(data, step, model, next(model.parameters()).device, True)
        optimizer.step()
        dist.barrier()
        seconds.append((time.perf_counter() - start, time.process_time() - processor))
    return seconds[WARM_UP:]


def main(flags: list[str]) -> None:
    from support.ranks import run

    function: Any = sys.modules["figures.watch_cost"].measured
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        steps = run(function, 2, flags, str(path), timeout=1800.0)[1]  # the rank that writes
        lines = path.read_text().splitlines()
    for at, name in enumerate(("wall", "processor")):
        plain = statistics.median(step[at] for step in steps[::2])
        logging = statistics.median(step[at] for step in steps[1::2])
        share = (logging - plain) / (INTERVAL * plain)
        print(
            f"{name}: a step {1e3 * plain:.1f} ms, a logging step {1e3 * logging:.1f} ms: "
            f"{share:.3%} of the run's time at --muon-log-interval {INTERVAL}"
        )
    print(f"a line has {len(lines[-1]) / 1e3:.1f} kB, the first one {len(lines[0]) / 1e3:.1f} kB")


if __name__ == "__main__":
    from figures import watch_cost

    watch_cost.main(sys.argv[1:])
