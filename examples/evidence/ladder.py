"""Trains larger and larger GPTs with AdamW and Muon, at rates around the best of the
size below; for a GPU, whenever there is one.

    python ladder.py 26M                   # every rate; writes figures/ladder.json
    python ladder.py 85M --minutes 10      # starts no piece after that
    python ladder.py --table               # prints the table again

A run is trained in pieces, each a process that loads what the one before saved. So it
can be ended anywhere, and the same command goes on from the last save. The text is the
quickstart's, and settings other than the rate are those of convergence.py's tuning.
Further flags go to train.py, each with its value behind an equals sign.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergence import tuned_flags
from training import HERE, NAMES, QUICKSTART, diverged, write

_BATCH = "--seq-length 512 --global-batch-size 64 --micro-batch-size 64"


@dataclass(frozen=True)
class Rung:
    """A size: its flags and steps, and its rates as multiples of the best of ``below``.

    The best rates below the lowest rung are those of ``rules.py --larger``.
    """

    below: str
    flags: str
    factors: tuple[float, ...]
    steps: int = 640


RUNGS = {
    "26M": Rung(
        "",
        f"{_BATCH} --num-layers 8 --hidden-size 512 --ffn-hidden-size 1376 "
        "--num-attention-heads 8",
        (0.25, 0.5, 1.0, 2.0),
    ),
    "85M": Rung(
        "26M",
        f"{_BATCH} --num-layers 12 --hidden-size 768 --ffn-hidden-size 2048 "
        "--num-attention-heads 12",
        (0.5, 1.0, 2.0),
    ),
}


@dataclass(frozen=True)
class Ladder:
    """Where runs lie, steps between their saves, and when no piece starts any more."""

    work: Path
    every: int
    end: float
    extra: tuple[str, ...]

    def loss(
        self, name: str, optimizer: str, lr: float, flags: str, steps: int
    ) -> float | None:
        """The loss of a run at its end, inf where it diverged; None where the time is
        over before.
        """
        given = f"--optimizer {optimizer} --lr {lr} --train-iters {steps} {flags}"
        of_run = hashlib.sha256(f"{given} {self.extra}".encode()).hexdigest()[:8]
        folder = self.work / f"{name}_{optimizer}_lr{lr:g}_{of_run}"
        done = _saved(folder)
        while done < steps:
            if time.monotonic() > self.end:
                print(f"{folder.name}: step {done} of {steps}", flush=True)
                return None
            until = min(done + self.every, steps)
            if not self._train(folder, done, until, given.split()):
                print(f"{folder.name}: diverged", flush=True)
                return math.inf
            done = until
        found = json.loads(_figures(folder, done).read_text())["figures"]["val_loss"]
        print(f"{folder.name}: {found:.4f}", flush=True)
        return float(found)

    def _train(self, folder: Path, done: int, until: int, flags: list[str]) -> bool:
        """One piece; False where it diverged. Its figures are written after its save,
        and stand for both.
        """
        unfinished = _checkpoint(folder, until)
        shutil.rmtree(unfinished, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(QUICKSTART / "train.py")]
        command += [f"@{QUICKSTART / 'gpt.args'}", "--seed", "1", *flags, *self.extra]
        command += ["--exit-at", str(until), "--save", str(unfinished)]
        command += ["--figures", str(_figures(folder, until))]
        if done:
            command += ["--load", str(_checkpoint(folder, done))]
        text = folder / f"to_{until}.log"
        with text.open("w") as log:
            ended = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, check=False
            )
        if ended.returncode:
            if diverged(text):
                return False
            raise RuntimeError(f"a piece failed: see {text}")
        shutil.rmtree(_checkpoint(folder, done), ignore_errors=True)
        return True


def _saved(folder: Path) -> int:
    """The steps that a run has saved."""
    steps = [int(file.stem.removeprefix("to_")) for file in folder.glob("to_*.json")]
    return max(steps, default=0)


def _figures(folder: Path, step: int) -> Path:
    return folder / f"to_{step}.json"


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / f"at_{step}"


def climb(
    ladder: Ladder, name: str, report: dict[str, Any], args: argparse.Namespace
) -> bool:
    """Trains a rung's runs and writes what ended; False where the time is over
    before.
    """
    rung = RUNGS[name]
    tuned = json.loads((args.figures / "tuning.json").read_text())
    losses = report.setdefault(name, {})
    for optimizer in args.only:
        start = _best_below(rung, optimizer, report, args.figures)
        for factor in args.factors or rung.factors:
            lr = float(f"{factor * start:.4g}")
            flags = f"{tuned_flags(tuned, optimizer)} {rung.flags}"
            steps = args.steps or rung.steps
            loss = ladder.loss(name, optimizer, lr, flags, steps)
            if loss is None:
                return False
            kept = round(loss, 5) if math.isfinite(loss) else None
            losses.setdefault(optimizer, {})[f"{lr:g}"] = kept
            write(args.figures / "ladder.json", report)
    return True


def _best_below(
    rung: Rung, optimizer: str, report: dict[str, Any], figures: Path
) -> float:
    if rung.below:
        found = best(report.get(rung.below, {}).get(optimizer, {}))
        if found is None:
            raise ValueError(f"no rate of {optimizer} has ended at {rung.below}")
        return found
    larger = json.loads((figures / "rules_larger.json").read_text())
    return float(larger["adamw" if optimizer == "adam" else "muon"]["lr"])


def best(losses: dict[str, float | None]) -> float | None:
    """The rate with the lowest loss; None if every one diverged."""
    finite = {lr: loss for lr, loss in losses.items() if loss is not None}
    return float(min(finite, key=lambda lr: finite[lr])) if finite else None


def table(report: dict[str, Any]) -> str:
    """In Markdown; a best rate at the edge of those that ended has a star."""
    lines = ["| size | optimizer | lr: loss, one seed | best lr |", "|---|---|---|--:|"]
    for size, optimizers in report.items():
        for optimizer, losses in optimizers.items():
            rates = sorted(losses, key=float)
            tried = ", ".join(f"{lr}: {_shown(losses[lr])}" for lr in rates)
            found = best(losses)
            star = "*" * (found in (float(rates[0]), float(rates[-1])))
            rate = "–" if found is None else f"{found:g}{star}"
            lines.append(f"| {size} | {NAMES[optimizer]} | {tried} | {rate} |")
    return "\n".join(lines)


def _shown(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=", ".join(RUNGS))
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--factors", nargs="+", type=float, help="of the rate below")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=int, default=160, help="steps between saves")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--work", type=Path, default=HERE / "out" / "ladder")
    parser.add_argument("--figures", type=Path, default=HERE / "figures")
    args, extra = parser.parse_known_args()  # the rest goes to train.py
    for size in args.sizes:
        if size not in RUNGS:
            parser.error(f"size {size}: choose from {', '.join(RUNGS)}")
    path = args.figures / "ladder.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    end = time.monotonic() + 60 * args.minutes
    ladder = Ladder(args.work, args.every, end, tuple(extra))
    for name in args.sizes if not args.table else []:
        if not climb(ladder, name, report, args):
            break
    print(table(report))


if __name__ == "__main__":
    main()
