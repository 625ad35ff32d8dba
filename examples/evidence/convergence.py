"""Trains with AdamW and Muon, both tuned, to see where Muon's advantage holds and where
it shrinks.

    python convergence.py tune             # writes figures/tuning.json
    python convergence.py                  # every question; writes figures/convergence.json
    python convergence.py --only "as tuned" experts
    python convergence.py --table          # prints the tables of figures/ again
    python convergence.py --draw           # draws figures/convergence.png again

Each run is the quickstart's training (gpt.args) in one process, with half the steps. A
question's rates are tried with the first seed; the best one of each optimizer is
repeated with the others. Runs that are in the work folder with the same flags are not
repeated. Further flags go to train.py, each with its value behind an equals sign
(``--train-iters=8``); then name other folders.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reports import draw, tables
from training import HERE, NAMES, Study, best, write

SEEDS = (1, 2, 3)
# Half of the quickstart's steps, so that all questions take hours and not days on 2
# cores.
BASE = "--train-iters 160 --eval-interval 10 --lr-warmup-iters 10"
# one setting after the other, the others as found so far; the rate again at the end
TUNED = {
    "adam": {
        "--lr": (1e-3, 2e-3, 3e-3, 5e-3, 8e-3),
        "--weight-decay": (0.03, 0.1, 0.3, 1.0),
        "--adam-beta2": (0.9, 0.95, 0.99),
        "--lr-warmup-iters": (5, 10, 30, 60, 100),
    },
    "muon": {
        "--lr": (5e-3, 1e-2, 2e-2, 4e-2),
        "--weight-decay": (0.03, 0.1, 0.3, 1.0),
        "--muon-momentum": (0.8, 0.9, 0.95),
        "--lr-warmup-iters": (5, 10, 30, 60, 100),
    },
}
START = {
    "adam": {
        "--lr": 2e-3,
        "--weight-decay": 0.1,
        "--adam-beta2": 0.95,
        "--lr-warmup-iters": 10,
    },
    "muon": {
        "--lr": 1e-2,
        "--weight-decay": 0.1,
        "--muon-momentum": 0.95,
        "--lr-warmup-iters": 10,
    },
}


@dataclass(frozen=True)
class Question:
    """What differs from the tuned runs.

    ``flags`` follow the tuned ones, so they win. ``matrices`` are flags of Muon's runs
    alone, since AdamW knows no matrices. ``warm_up`` multiplies each optimizer's tuned
    warm-up steps. The tuned rate is tried times each factor of ``adam`` and ``muon``.
    """

    flags: str = ""
    matrices: str = ""
    warm_up: float = 1.0
    adam: tuple[float, ...] = (1.0,)
    muon: tuple[float, ...] = (1.0,)
    seeds: tuple[int, ...] = SEEDS


_AGAIN = (0.5, 1.0, 2.0)
_SMALL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 172 --num-attention-heads 2 "
)
_FUSED = "--muon-split *.linear_qkv.weight=whole --muon-split *.linear_fc1.weight=whole"
QUESTIONS = {
    # Q, K and V are three matrices, fc1 is one
    "as tuned": Question("--evaluate-other-text"),
    "QKV fused, gate and up fused": Question(
        "--evaluate-other-text", _FUSED, muon=_AGAIN
    ),
    "QKV split, gate and up split": Question(
        "--evaluate-other-text", "--muon-split *.linear_fc1.weight=gate-up", muon=_AGAIN
    ),
    "decay on all parameters": Question("--weight-decay-all-params"),
    "batch x 4, the same tokens": Question(
        "--global-batch-size 128 --train-iters 40 --eval-interval 2 --eval-iters 1",
        warm_up=0.25,
        adam=_AGAIN,
        muon=_AGAIN,
    ),
    "batch / 4, the same tokens": Question(
        "--global-batch-size 8 --micro-batch-size 8 --train-iters 640 --eval-interval "
        "40 --eval-iters 16",
        warm_up=4.0,
        adam=_AGAIN,
        muon=_AGAIN,
        seeds=SEEDS[:2],
    ),
    "experts": Question(
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 172",
        adam=_AGAIN,
        muon=_AGAIN,
    ),
    "four times the tokens": Question(
        "--train-iters 640 --eval-interval 40",
        warm_up=4.0,
        adam=(0.5, 1.0),
        muon=(0.5, 1.0),
        seeds=SEEDS[:2],
    ),
    "small": Question(
        _SMALL + "--train-iters 80 --eval-interval 5",
        warm_up=0.5,
        adam=_AGAIN,
        muon=(0.5, 1.0, 2.0, 4.0),
    ),
    "small, 16 times the tokens": Question(  # 53 for each parameter of its layers
        _SMALL + "--train-iters 1280 --eval-interval 80",
        warm_up=8.0,
        adam=(0.5, 1.0, 2.0),
        muon=(0.25, 0.5, 1.0, 2.0),
        seeds=SEEDS[:2],
    ),
    "large": Question(
        "--num-layers 6 --hidden-size 192 --ffn-hidden-size 512 --num-attention-heads "
        "6 --train-iters 320 --eval-interval 20",
        warm_up=2.0,
        adam=(0.5, 1.0),
        muon=(0.5, 1.0),
        seeds=SEEDS[:2],
    ),
}


def tune(study: Study) -> dict[str, Any]:
    """Searches along one setting after the other, with the first seed."""
    report: dict[str, Any] = {"seed": SEEDS[0], "tried": TUNED}
    for optimizer, grid in TUNED.items():
        found, trials = dict(START[optimizer]), []
        for setting in [*grid, "--lr"]:
            settings = [{**found, setting: value} for value in grid[setting]]
            with ThreadPoolExecutor(study.jobs) as pool:
                losses = list(pool.map(partial(_loss, study, optimizer), settings))
            pairs = zip(settings, losses, strict=True)
            trials += [{**tried, "loss": loss} for tried, loss in pairs]
            finite = [float("inf") if loss is None else loss for loss in losses]
            found = settings[finite.index(min(finite))]
        edges = [
            setting
            for setting, values in grid.items()
            if found[setting] in (values[0], values[-1])
        ]
        report[optimizer] = {"found": found, "at_edge": edges, "trials": trials}
    return report


def _loss(study: Study, optimizer: str, settings: dict[str, float]) -> float | None:
    runs = study.losses(optimizer, (settings["--lr"],), SEEDS[:1], _words(settings))
    loss: float | None = runs[settings["--lr"]][0]["loss"]
    return loss


def tuned_flags(tuned: dict[str, Any], optimizer: str) -> str:
    """The flags of an optimizer as tuned, without its rate."""
    return _words(tuned[optimizer]["found"])


def _words(settings: dict[str, float]) -> str:
    """The base's flags, then all settings except the rate."""
    others = (f"{name} {value:g}" for name, value in settings.items() if name != "--lr")
    return " ".join([BASE, *others])


def ask(study: Study, question: Question, tuned: dict[str, Any]) -> dict[str, Any]:
    """Each optimizer's runs at its best rate under the question's flags."""
    report: dict[str, Any] = {"flags": question.flags, "seeds": question.seeds}
    if question.matrices:
        report["matrices"] = question.matrices
    for optimizer in NAMES:
        settings = tuned[optimizer]["found"]
        rates = tuple(
            round(settings["--lr"] * factor, 6)
            for factor in getattr(question, optimizer)
        )
        scaled = round(settings["--lr-warmup-iters"] * question.warm_up)
        flags = f"{_words({**settings, '--lr-warmup-iters': scaled})} {question.flags}"
        if optimizer == "muon":
            flags += f" {question.matrices}"
        tried = study.losses(optimizer, rates, question.seeds[:1], flags)
        rate = best(tried)
        runs = study.losses(optimizer, (rate,), question.seeds, flags)[rate]
        report[optimizer] = {
            "lr": rate,
            "at_edge": len(rates) > 1 and rate in (rates[0], rates[-1]),
            "tried": {f"{one:g}": seeds[0]["loss"] for one, seeds in tried.items()},
            "runs": runs,
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("tune", "ask"), default="ask")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument(
        "--table", action="store_true", help="run nothing; print the tables"
    )
    parser.add_argument(
        "--draw", action="store_true", help="run nothing; draw the pictures"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=HERE / "out" / "convergence")
    parser.add_argument("--figures", type=Path, default=HERE / "figures")
    args, extra = parser.parse_known_args()  # the rest goes to train.py
    study = Study(args.work, args.jobs, tuple(extra))
    tuning, asked = args.figures / "tuning.json", args.figures / "convergence.json"
    if not (args.table or args.draw) and args.what == "tune":
        write(tuning, tune(study))
        return
    if not (args.table or args.draw):
        tuned = json.loads(tuning.read_text())
        report = json.loads(asked.read_text()) if asked.exists() else {}
        for name in args.only:
            report[name] = ask(study, QUESTIONS[name], tuned)
            write(asked, {each: report[each] for each in QUESTIONS if each in report})
    found = json.loads(asked.read_text())
    if not args.table:
        draw(found, args.figures / "convergence.png")
    print(tables(json.loads(tuning.read_text()), found))


if __name__ == "__main__":
    main()
