"""Takes steps on many ranks with random pauses, then kills one rank in the middle of a
step.

    python stress.py                       # 8 ranks, 2,000 steps; writes figures/stress-8.json
    python stress.py --ranks 32 --tp 4     # figures/stress-32.json
    python stress.py --kill-only           # repeats the kill alone, and keeps the other figures
    python stress.py --table               # prints the table of all of them again

Each rank is a process with megatron-core's DDP and DistributedOptimizer over gloo, and
a small GPT. Its gradients are noise that differs by rank and step, so that the time
goes into reduction, step and all-gather. Ranks sleep before a step at random. Every so
many steps all weights are hashed: data-parallel replicas must have the same bits. Then
one rank kills itself in the middle of a step, and each other rank must end with an
error within the time limit of a collective.
"""  # noqa: E501

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from training import HERE, QUICKSTART, write

TIMEOUT = 30.0  # seconds that a collective may take
PAUSE = 0.02  # before a step one rank in ten sleeps up to so many seconds
SHAPE = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --bf16 "
    "--use-distributed-optimizer --clip-grad 1.0 --weight-decay 0.1 --lr 1e-3"
).split()


def worker(args: argparse.Namespace) -> None:
    """Runs one rank, which writes what it saw into its file, and what ended it."""
    report: dict[str, Any] = {"checks": [], "rss_mib": []}
    try:
        _steps(args, report)
    except Exception as error:
        report["error"] = " ".join(str(error).split())[:600]
        report["ended"] = time.time()
        report["phase"] = getattr(error, "phase", None)
    Path(args.folder, f"rank{args.rank}.json").write_text(json.dumps(report))
    os._exit(0)  # a group whose peer is gone may hang in its destructor


def _steps(args: argparse.Namespace, report: dict[str, Any]) -> None:
    import megatron_muon.cpu

    megatron_muon.cpu.enable()
    sys.path.insert(0, str(QUICKSTART))
    import psutil
    import torch
    import train  # the quickstart's
    from arguments import parse
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from model import build_model

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{args.folder}/rendezvous", rank=args.rank,
        world_size=args.ranks, timeout=datetime.timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    parallel_state.initialize_model_parallel(args.tp)
    model_parallel_cuda_manual_seed(1)
    given = [
        *SHAPE,
        "--tensor-model-parallel-size",
        str(args.tp),
        "--optimizer",
        args.optimizer,
    ]
    flags = parse(given)
    model = build_model(flags)
    optimizer, _ = train.build_optimizer(flags, model)
    for group in optimizer.param_groups:
        group["lr"] = flags.lr
    pauses = random.Random(args.rank)
    noise = torch.Generator().manual_seed(args.rank)
    victim = args.ranks // 2 + 1
    began = time.perf_counter()
    for step in range(1, args.steps + args.kill + 1):
        if pauses.random() < 0.1:
            time.sleep(PAUSE * pauses.random())
        model.zero_grad_buffer()
        optimizer.zero_grad()
        for param in model.parameters():
            param.main_grad.normal_(0.0, 1e-3, generator=noise)
        if step > args.steps and args.rank == victim:
            threading.Timer(0.01 * pauses.random(), _die, [args.folder]).start()
        model.finish_grad_sync()
        optimizer.step()
        if step % args.every == 0 and step <= args.steps:
            report["checks"].append([step, _hash(model)])
            report["rss_mib"].append([step, psutil.Process().memory_info().rss >> 20])
        report["seconds"] = time.perf_counter() - began
    report["tp_rank"] = parallel_state.get_tensor_model_parallel_rank()


def _die(folder: str) -> None:
    Path(folder, "killed").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def _hash(model: Any) -> str:
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().float().numpy().tobytes())
    return digest.hexdigest()[:16]


def started(args: argparse.Namespace, kill: bool) -> list[dict[str, Any] | None]:
    """Every rank's report; None for the one that was killed."""
    with tempfile.TemporaryDirectory(prefix="stress") as folder:
        command = [
            sys.executable,
            __file__,
            "--ranks",
            str(args.ranks),
            "--tp",
            str(args.tp),
        ]
        command += [
            "--steps",
            str(5 if kill else args.steps),
            "--every",
            str(args.every),
        ]
        command += [
            "--optimizer",
            args.optimizer,
            "--folder",
            folder,
            "--kill",
            str(20 * kill),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdout=subprocess.DEVNULL,
                env=environment,
            )
            for rank in range(args.ranks)
        ]
        for rank in ranks:
            rank.wait()
        files = [Path(folder, f"rank{rank}.json") for rank in range(args.ranks)]
        reports = [
            json.loads(file.read_text()) if file.exists() else None for file in files
        ]
        if kill:
            killed = float(Path(folder, "killed").read_text())
            for report in filter(None, reports):
                report["seconds_after"] = report.pop("ended", time.time()) - killed
        return reports


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures both parts; raises if a replica differs."""
    reports = [report for report in started(args, kill=False) if report is not None]
    errors = [report["error"] for report in reports if "error" in report]
    if errors or len(reports) < args.ranks:
        raise RuntimeError(f"{args.ranks - len(reports)} ranks died, {errors[:1]}")
    for tp_rank in range(args.tp):
        replicas = [
            report["checks"] for report in reports if report["tp_rank"] == tp_rank
        ]
        if any(other != replicas[0] for other in replicas):
            raise RuntimeError(f"replicas of TP rank {tp_rank} have other weights")
    warm = max(0, len(reports[0]["rss_mib"]) // 10)
    growth = [
        report["rss_mib"][-1][1] - report["rss_mib"][warm][1] for report in reports
    ]
    return {
        "ranks": args.ranks,
        "tp": args.tp,
        "steps": args.steps,
        "checks": len(reports[0]["checks"]),
        "ms_a_step": round(
            1e3 * statistics.median(r["seconds"] for r in reports) / args.steps, 1
        ),
        "rss_mib": max(report["rss_mib"][-1][1] for report in reports),
        "rss_growth_mib": {
            "from_step": reports[0]["rss_mib"][warm][0],
            "most": max(growth),
        },
        "timeout": TIMEOUT,
        "killed": kill_one(args),
    }


def kill_one(args: argparse.Namespace) -> dict[str, Any]:
    """How the others end after one rank is killed in the middle of a step."""
    ends = started(args, kill=True)
    return {
        "dead": ends.count(None),
        "with_error": sum("error" in end for end in ends if end is not None),
        "latest_seconds": round(
            max(e["seconds_after"] for e in ends if e is not None), 1
        ),
        "named": sorted(
            {_named(end["error"]) for end in ends if end and "error" in end}
        ),
    }


def _named(error: str) -> str:
    """The phase that an error names; gloo's own error, as with AdamW, names none."""
    phase, colon, _ = error.partition(":")
    return (
        phase
        if colon and re.fullmatch(r"[a-z_]+/[a-z_]+", phase)
        else "gloo's own error"
    )


def table(reports: list[dict[str, Any]]) -> str:
    """In Markdown, with a column for each report."""
    columns = [_column(report) for report in reports]
    lines = [f"| ranks | {' | '.join(column.pop('ranks') for column in columns)} |"]
    lines.append(f"|---|{'---|' * len(columns)}")
    lines += [
        f"| {name} | {' | '.join(column[name] for column in columns)} |"
        for name in columns[0]
    ]
    return "\n".join(lines)


def _column(report: dict[str, Any]) -> dict[str, str]:
    killed, growth = report["killed"], report["rss_growth_mib"]
    return {
        "ranks": f"{report['ranks']} over gloo, TP{report['tp']}",
        "steps": f"{report['steps']:,}, {report['ms_a_step']:g} ms each",
        "replicas compared": f"{report['checks']} times, always the same bits",
        "memory of a rank": f"{report['rss_mib']} MiB; since step "
f"{growth['from_step']} "
                            f"{growth['most']:+d} MiB on the rank that grew most",
        (
"one rank killed in a step"
): f"{killed['with_error']} of {report['ranks'] - 1} others end "
            f"with an error, the last {killed['latest_seconds']} s later; the limit of "
            f"a collective is {report['timeout']:g} s; they name "
            f"{', '.join(killed['named'])}",
    }  # fmt: skip


def recorded(figures: Path) -> list[dict[str, Any]]:
    """The reports in a folder, by their number of ranks."""
    found = [json.loads(path.read_text()) for path in figures.glob("stress-*.json")]
    return sorted(found, key=lambda report: report["ranks"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--every", type=int, default=50, help="steps between two comparisons"
    )
    parser.add_argument("--optimizer", choices=("muon", "adam"), default="muon")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument(
        "--kill-only", action="store_true", help="repeat the kill alone"
    )
    parser.add_argument("--figures", type=Path, default=HERE / "figures")
    for name in ("--rank", "--kill"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        worker(args)
    path = args.figures / f"stress-{args.ranks}.json"
    if args.kill_only:
        write(path, json.loads(path.read_text()) | {"killed": kill_one(args)})
    elif not args.table:
        write(path, measure(args))
    print(table(recorded(args.figures)))


if __name__ == "__main__":
    main()
