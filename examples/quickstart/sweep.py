"""Finds each optimizer's best learning rate, or repeats both at their best with several
seeds.

    python sweep.py                        # both grids, writes figures/sweep.json
    python sweep.py --seeds 1 2 3          # at the best rates there, writes figures/seeds.json
    python sweep.py --transfer             # AdamW's rates given to Muon under other batches,
                                           # warm-ups, decays and lengths:
                                           figures/transfer.json

Each run is the quickstart's training (gpt.args: same global batch, data order, initial
weights and schedule) in ONE process, which is faster than eight on a small machine;
``--jobs`` run at a time. Runs that are already in the work folder with the same flags
are not repeated.
"""  # noqa: E501

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GRIDS = {
    "muon": [1e-3, 2e-3, 5e-3, 1e-2, 2e-2],
    "adam": [5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2],
}
Key = tuple[str, float, int]  # optimizer, learning rate, seed


@dataclass(frozen=True)
class Setting:
    """What differs from gpt.args, and the rates that are tried there."""

    flags: str
    adam: tuple[float, ...]
    muon: tuple[float, ...]


# 128 windows, as gpt.args
_BATCH_8 = "--global-batch-size 8 --micro-batch-size 8 --eval-iters 16"
SETTINGS = {
    "batch 32": Setting("", (2e-3,), ()),
    "batch 8": Setting(
        _BATCH_8, (1e-3, 2e-3, 4e-3, 8e-3), (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    ),
    "batch 8, no warm-up": Setting(
        f"{_BATCH_8} --lr-warmup-iters 0", (2e-3,), (2e-3, 8e-3)
    ),
    "batch 8, 640 steps, constant": Setting(
        f"{_BATCH_8} --train-iters 640 --lr-decay-style constant", (2e-3,), (2e-3,)
    ),
}


def run_one(key: Key, work: Path, extra: list[str]) -> dict[str, Any]:
    """Trains one run as its own process and returns the figures it wrote."""
    optimizer, lr, seed = key
    flags = hashlib.sha256(
        ((HERE / "gpt.args").read_text() + str(extra)).encode()
    ).hexdigest()[:8]
    name = f"{optimizer}_lr{lr:g}_seed{seed}_{flags}"
    figures = work / f"{name}.json"
    if not figures.exists():
        command = [sys.executable, str(HERE / "train.py"), f"@{HERE / 'gpt.args'}"]
        command += ["--optimizer", optimizer, "--lr", str(lr), "--seed", str(seed)]
        command += ["--micro-batch-size", "32", "--figures", str(figures), *extra]
        with (work / f"{name}.log").open("w") as log:
            done = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, check=False
            )
        if done.returncode and not diverged(work / f"{name}.log"):
            raise RuntimeError(f"{name} failed: see {work / f'{name}.log'}")
    if not figures.exists():
        print(f"{name}: diverged", flush=True)
        return {"val_loss": None, "train_loss": None}
    result = json.loads(figures.read_text())
    print(f"{name}: validation {result['figures']['val_loss']:.4f}", flush=True)
    return {
        **result["figures"],
        **result["curve"],
        "corpus_sha256": result["corpus_sha256"],
    }


def diverged(log: Path) -> bool:
    """Whether a run ended since its loss was not finite."""
    return "FloatingPointError: the loss is" in log.read_text()


def run_all(
    keys: list[Key], work: Path, jobs: int, extra: list[str]
) -> dict[Key, dict[str, Any]]:
    """Runs all of ``keys``, ``jobs`` at a time, one thread each."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    work.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        return dict(
            zip(
                keys, pool.map(lambda key: run_one(key, work, extra), keys), strict=True
            )
        )


def best_rate(rows: list[dict[str, Any]]) -> tuple[float, bool]:
    """The rate with the lowest validation loss, and whether it is the grid's first or
    last.
    """
    rows = sorted(rows, key=lambda row: row["lr"])
    losses = [
        float("inf") if row["val_loss"] is None else row["val_loss"] for row in rows
    ]
    best = losses.index(min(losses))
    return float(rows[best]["lr"]), best in (0, len(rows) - 1)


def sweep(args: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    """Runs both grids with one seed; the figures of each rate and the best ones."""
    grids = {"muon": args.muon_lrs, "adam": args.adam_lrs}
    keys = [(name, lr, args.seed) for name, grid in grids.items() for lr in grid]
    results = run_all(keys, args.work, args.jobs, extra)
    report: dict[str, Any] = {"seed": args.seed}
    for name in grids:
        rows = [
            {"lr": lr, "val_loss": run["val_loss"], "train_loss": run["train_loss"]}
            for (optimizer, lr, _), run in sorted(
                results.items(), key=lambda item: item[0]
            )
            if optimizer == name
        ]
        best, at_edge = best_rate(rows)
        report[name] = {"best_lr": best, "at_edge": at_edge, "runs": rows}
    corpora = {
        run["corpus_sha256"] for run in results.values() if "corpus_sha256" in run
    }
    if len(corpora) != 1:
        raise ValueError(
            f"runs in {args.work} saw different texts, {corpora}: empty it"
        )
    return {**report, "corpus_sha256": corpora.pop()}


def repeat(args: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    """Runs both optimizers at the recorded best rates with each of ``--seeds``."""
    recorded = json.loads((args.figures / "sweep.json").read_text())
    rates = {name: recorded[name]["best_lr"] for name in GRIDS}
    keys = [(name, lr, seed) for name, lr in rates.items() for seed in args.seeds]
    results = run_all(keys, args.work, args.jobs, extra)
    report: dict[str, Any] = {"seeds": args.seeds}
    for name, lr in rates.items():
        losses = [results[name, lr, seed]["val_loss"] for seed in args.seeds]
        spread = max(losses) - min(losses)
        mean = statistics.fmean(losses)
        report[name] = {"lr": lr, "val_losses": losses, "mean": mean, "spread": spread}
    report["gap"] = report["adam"]["mean"] - report["muon"]["mean"]
    report["gap_over_spread"] = report["gap"] / max(
        report[name]["spread"] for name in rates
    )
    return report


def transfer(args: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    """Runs ``SETTINGS``; of each its runs with the size of the layers' updates over
    steps.
    """
    settings: dict[str, Any] = {}
    corpora = set()
    for name, setting in SETTINGS.items():
        rates = {"adam": setting.adam, "muon": setting.muon}
        keys = [(one, lr, 1) for one in rates for lr in rates[one]]
        flags = [*setting.flags.split(), "--record-update-rms", *extra]
        results = run_all(keys, args.work, args.jobs, flags)
        corpora |= {
            run["corpus_sha256"] for run in results.values() if "corpus_sha256" in run
        }
        rows = []
        for (optimizer, lr, _), run in results.items():
            sizes = [round(rms, 3) for _, rms in run.get("update_rms", [])]
            size = [sizes[0], statistics.median(sizes), sizes[-1]] if sizes else None
            row = {"optimizer": optimizer, "lr": lr, "val_loss": run["val_loss"]}
            curve = [
                [step, round(loss, 4)] for step, loss in run.get("validation", [])[::4]
            ]
            rows.append({**row, "update_rms": size, "validation": curve})
        settings[name] = {"flags": setting.flags, "runs": rows}
    if len(corpora) != 1:
        raise ValueError(
            f"runs in {args.work} saw different texts, {corpora}: empty it"
        )
    what = "root mean square of the layers' updates per unit of lr: first, median, last"
    return {
        "seed": 1,
        "update_rms": what,
        "settings": settings,
        "corpus_sha256": corpora.pop(),
    }


def transfer_table(report: dict[str, Any]) -> str:
    """The runs of ``transfer`` in Markdown: a rate in a line, both optimizers side by
    side.
    """
    lines = [
        "| setting | lr | AdamW: loss | size of updates | Muon: loss | size of updates "
        "|"
    ]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for name, setting in report["settings"].items():
        by_key = {(run["optimizer"], run["lr"]): run for run in setting["runs"]}
        for lr in sorted({lr for _, lr in by_key}):
            cells = [
                _cells(by_key.get((optimizer, lr))) for optimizer in ("adam", "muon")
            ]
            lines.append(f"| {name} | {lr:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(run: dict[str, Any] | None) -> str:
    if run is None:
        return "| "
    if run["val_loss"] is None:
        return "diverged | "
    first, median, last = run["update_rms"]
    return f"{run['val_loss']:.3f} | {first:.2f}, {median:.2f}, {last:.2f}"


def measure_and_print(
    name: str,
    description: str | None,
    measure: Callable[[argparse.Namespace, list[str]], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
) -> None:
    """The command line of a script that writes ``figures/NAME.json`` and prints its
    table.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument(
        "--work", type=Path, default=HERE / "out" / name, help="single runs"
    )
    parser.add_argument(
        "--figures", type=Path, default=HERE / "figures", help="the results"
    )
    args, extra = parser.parse_known_args()  # the rest goes to train.py
    path = args.figures / f"{name}.json"
    if not args.table:
        report = measure(args, extra)
        args.figures.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
    print(table(json.loads(path.read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--muon-lrs", type=float, nargs="+", default=GRIDS["muon"])
    parser.add_argument("--adam-lrs", type=float, nargs="+", default=GRIDS["adam"])
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="repeat at the best rates instead"
    )
    parser.add_argument("--transfer", action="store_true", help="run SETTINGS instead")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument(
        "--work", type=Path, default=HERE / "out" / "sweep", help="single runs"
    )
    parser.add_argument(
        "--figures", type=Path, default=HERE / "figures", help="the results"
    )
    # the rest goes to train.py, e.g. --train-iters 100
    args, extra = parser.parse_known_args()
    if args.transfer:
        name, report = "transfer.json", transfer(args, extra)
    elif args.seeds:
        name, report = "seeds.json", repeat(args, extra)
    else:
        name, report = "sweep.json", sweep(args, extra)
    args.figures.mkdir(parents=True, exist_ok=True)
    path = args.figures / name
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(transfer_table(report) if args.transfer else json.dumps(report, indent=1))
    print(f"Wrote {path}")
    for name in GRIDS:
        if report.get(name, {}).get("at_edge"):
            sys.exit(f"{name}'s best rate is at the edge of its grid: widen it")


if __name__ == "__main__":
    main()
