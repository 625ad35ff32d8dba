"""Train one small GPT with AdamW and Muon over several topologies; write a report.

    python compare.py             # dp4 tp4 tp2-dp2 pp2-dp2 tp2-pp2-dp2
    python compare.py --topologies dp4 tp4-dp2 --hidden 512 --swiglu
    torchrun --nproc-per-node 8 compare.py --topologies dp8 tp2-pp2-dp2

The report has the time of a step, bytes beside AdamW's and the plan's, memory,
and losses. Ranks are processes of this machine, over NCCL with a GPU for each,
over gloo without. Under torchrun (RANK and WORLD_SIZE are set) they are the
launcher's, and the topologies of as many ranks are compared. Further flags are
Megatron-LM's, of the model: --swiglu, --num-experts 8, ...
--folder keeps each training: the next call trains only what is missing there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import compare_ranks
import topologies
import torch

import megatron_muon.cpu
from megatron_muon.lab.bench import seams as bench_seams
from megatron_muon.lab.bench.step.flags import parsed
from megatron_muon.lab.bench.step.rows import rows
from megatron_muon.lab.dry_run import seams as dry_run_seams
from megatron_muon.lab.interrupts import STOPPED
from megatron_muon.lab.outputs import require_writable
from megatron_muon.lab.ranks import RankError, Task, gpus_for, run_ranks, threads_for
from megatron_muon.lab.routes.model_flags import REFUSALS, megatron_is_quiet
from megatron_muon.mcore.checkpoint.files import write_text
from megatron_muon.mcore.seams.rows import check_rows, megatron_version
from megatron_muon.orthogonalize.matmul import plan_device
from megatron_muon.presence import SeamError
from megatron_muon.settings.config import MuonConfig

USUAL = ("dp4", "tp4", "tp2-dp2", "pp2-dp2", "tp2-pp2-dp2")
ROWS = {"adamw": "adamw", "muon": "muon-contiguous"}
EXCHANGE, MEGATRONS = ("gather", "scatter"), ("grad_reduce", "param_gather")
LAUNCHED = "RANK" in os.environ and "WORLD_SIZE" in os.environ
FIRST = not LAUNCHED or os.environ["RANK"] == "0"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--topologies", nargs="+", default=USUAL, metavar="SIZES")
    made.add_argument(
        "--folder", type=Path, default=Path("out/compare"), help="(%(default)s)"
    )
    usuals = {"steps": 12, "lr-adamw": 2e-3, "lr-muon": 1e-2}
    for name, usual in (
        usuals | {"micro-batch-size": 2, "global-batch-size": 16}
    ).items():
        made.add_argument(
            f"--{name}", type=type(usual), default=usual, help="(%(default)s)"
        )
    made.add_argument(
        "--threads", type=int, help="threads per rank (default: cores/ranks)"
    )
    made.add_argument(
        "--minutes", type=float, default=60, help="for a training (%(default)s)"
    )
    return made


def sizes_of(name: str) -> dict[str, int]:
    """tp2-pp2-dp2 as sizes; those that are left out are 1."""
    parts = re.findall(r"(tp|pp|cp|dp)([1-9]\d{0,3})", name)
    if "-".join(map("".join, parts)) != name or len(dict(parts)) < len(parts):
        raise ValueError(f"{name!r} is no topology: give sizes such as tp2-pp2-cp2-dp2")
    return {"tp": 1, "pp": 1, "cp": 1, "dp": 1} | {
        part: int(size) for part, size in parts
    }


def chosen(names: list[str]) -> dict[str, dict[str, int]]:
    """The topologies; under a launcher those of as many ranks as it has started."""
    every = {name: sizes_of(name) for name in names}
    if not LAUNCHED:
        for name, sizes in every.items():
            gpus_for(math.prod(sizes.values()), name, "--topologies")
        return every
    world = int(os.environ["WORLD_SIZE"])
    fitting = {
        name: each for name, each in every.items() if math.prod(each.values()) == world
    }
    if not fitting:
        raise ValueError(
            f"the launcher has started {world} ranks, and no topology of "
            f"{', '.join(every)} has as many: see --topologies"
        )
    return fitting


def jobs_over(
    name: str, sizes: dict[str, int], given: Namespace, of_megatron: list[str]
) -> dict[str, compare_ranks.Job]:
    """A training for each optimizer."""
    for flag in ("lr_adamw", "lr_muon", "micro_batch_size", "global_batch_size"):
        if not 0 < getattr(given, flag) < math.inf:
            raise ValueError(f"--{flag.replace('_', '-')} must be above 0 and finite")
    if given.steps <= compare_ranks.WARM_UP:
        raise ValueError(
            f"--steps must be above {compare_ranks.WARM_UP}, which are not timed"
        )
    sequences = given.micro_batch_size * sizes["dp"]
    if given.global_batch_size % sequences:
        raise ValueError(
            f"--global-batch-size {given.global_batch_size} is not a multiple of "
            f"--micro-batch-size x dp, {sequences} over {name}"
        )
    usual = ["--hidden-dropout=0", "--attention-dropout=0", "--seq=128", "--vocab=4096"]
    usual += [f"--{dimension}={size}" for dimension, size in sizes.items()]
    flags = parsed([*usual, *of_megatron], "compare.py")
    if flags.num_layers % sizes["pp"]:
        raise ValueError(
            f"--layers {flags.num_layers} is not a multiple of {name}'s pp"
        )
    batch = (given.micro_batch_size, given.global_batch_size // sequences)
    jobs = {}
    for optimizer, row_name in ROWS.items():
        (row,) = rows(MuonConfig(), [row_name])
        lr = getattr(given, f"lr_{optimizer}")
        jobs[optimizer] = compare_ranks.Job(flags, row, lr, given.steps, *batch)
    return jobs


def ranks_of(
    path: Path, job: compare_ranks.Job, where: str, given: Namespace, place: str
) -> Any:
    """What each rank measured: read where the same training is in the file, else
    trained.
    """
    known = hashlib.sha256(f"{job!r} {where}".encode()).hexdigest()
    ranks = read(path, known) if FIRST else None
    if LAUNCHED:
        ranks = compare_ranks.first_ranks(ranks)  # others may not see its files
    if ranks is not None:
        return ranks
    if FIRST:
        print(f"training {path.stem}, {place}", file=sys.stderr, flush=True)
    if LAUNCHED:
        ranks = compare_ranks.train_in_launched_world(job)
    else:
        world, gpus = job.flags.world_size, torch.cuda.device_count() > 0
        threads = threads_for(world, given.threads)
        task = Task(
            compare_ranks.train,
            job,
            world,
            gpus,
            threads,
            60 * given.minutes,
            builds=True,
        )
        ranks = run_ranks(task)
    if FIRST:
        write_text(path, json.dumps({"of": known, "ranks": ranks}))
    return ranks


def read(path: Path, known: str) -> Any:
    """The ranks of a training's file; None where it is of another training, damaged or
    missing.
    """
    try:
        stored = json.loads(path.read_text())
        return stored["ranks"] if stored["of"] == known else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def figures(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the slowest and the fullest rank; bytes of all ranks, and the busiest's
    exchange.
    """
    sent = {
        kinds: [sum(rank["sent"].get(kind, 0) for kind in kinds) for rank in ranks]
        for kinds in (EXCHANGE, MEGATRONS)
    }
    most = ("step_ms", "optimizer_ms", "state_bytes", "peak_bytes")
    return {name: max(rank[name] for rank in ranks) for name in most} | {
        "megatrons": sum(sent[MEGATRONS]),
        "exchange": sum(sent[EXCHANGE]),
        "busiest": max(sent[EXCHANGE]),
        "losses": next(rank["losses"] for rank in ranks if rank["losses"]),
    }


def page(found: dict[str, Any]) -> str:
    run = found["run"]
    parts = [
        "# AdamW and Muon over several topologies",
        f"`compare.py {' '.join(run['arguments'])}`",
        f"{run['model']}; {run['where']}; planned for {run['planned_for']}.",
        "Times are medians over the steps after the first two, of the slowest rank. "
        "Losses are of a text that repeats itself: they show that both train, no more.",
        topologies.times_and_losses(found),
        "Bytes are those that all ranks send in a step. Gradients travel in fp32, "
        "parameters and the exchange in bf16, so the paper's algorithm sends at most "
        "1.333 times AdamW's bytes. The exchange goes over TP, too, and back, so the "
        "ratio passes that where most matrices travel. State is that of fp32 main "
        "parameters and the optimizer.",
        topologies.table(found),
        "The peak is that of Megatron's `optimizer.step()` above all that was there "
        "before it. Single numbers, such as norms and flags, are not planned; nor are "
        "peaks.",
        topologies.peaks(found),
    ]
    return "\n\n".join(parts) + "\n"


def planned_jobs(
    given: Namespace, of_megatron: list[str], device: Any
) -> tuple[Any, Any]:
    """Trainings and planned bytes by topology; planning makes groups, so before a
    launcher's.
    """
    from planned import planned as planned_bytes

    check_rows((*dry_run_seams.ROWS, *bench_seams.ROWS))
    jobs, planned = {}, {}
    for name, sizes in chosen(given.topologies).items():
        jobs[name] = both = jobs_over(name, sizes, given, of_megatron)
        configs = (both[optimizer].row.config for optimizer in ("muon", "adamw"))
        planned[name] = planned_bytes(both["muon"].flags, *configs, device)
    if FIRST:
        given.folder.mkdir(parents=True, exist_ok=True)
        require_writable("--folder", given.folder / "report.md")
    return jobs, planned


def main(argv: list[str]) -> None:
    given, of_megatron = (made := parser()).parse_known_args(argv)
    gpus = torch.cuda.device_count() > 0
    if not (megatron_muon.cpu.enabled() or (LAUNCHED and gpus)):
        # with GPUs this process only starts ranks
        megatron_muon.cpu.enable(allow_cuda=True)
    device = plan_device(torch.device("cuda" if gpus else "cpu"), MuonConfig())
    with megatron_is_quiet():
        try:
            jobs, planned = planned_jobs(given, of_megatron, device)
        except (*REFUSALS, TypeError, OSError, SeamError) as error:
            made.error(
                " ".join(str(error).split()) or f"Megatron refuses this: {error!r}"
            )
    where = torch.cuda.get_device_name() if gpus else "CPU over gloo"
    where += (
        f", {os.cpu_count()} cores of the first machine, torch {torch.__version__}, "
    )
    where += (
        f"megatron-core {megatron_version()[0]}, megatron_muon "
        f"{megatron_muon.__version__}"
    )
    if LAUNCHED:
        compare_ranks.join_world(gpus)
    every, begun = [], 0
    for name, both in jobs.items():
        each: dict[str, Any] = {"name": name, "predicted": planned[name]}
        for optimizer, job in both.items():
            path = given.folder / f"{name}-{optimizer}.json"
            begun += 1
            place = f"{begun} of {2 * len(jobs)}"
            each[optimizer] = figures(ranks_of(path, job, where, given, place))
        without = each["adamw"]["megatrons"]
        sent = each["muon"]["megatrons"] + each["muon"]["exchange"]
        every.append(each | {"byte_ratio": sent / without if without else None})
    if LAUNCHED:
        compare_ranks.leave_world()
    if FIRST:
        flags = next(iter(jobs.values()))["adamw"].flags
        model = f"{flags.num_layers} layers, hidden {flags.hidden_size}, vocabulary "
        model += (
            f"{flags.vocab_size}, {given.global_batch_size} sequences of "
            f"{flags.seq_length}"
        )
        model += " a step"
        run = {"arguments": argv, "model": model, "where": where, "planned_for": device}
        found = {"run": run, "topologies": every}
        write_text(given.folder / "report.json", json.dumps(found, indent=1) + "\n")
        write_text(given.folder / "report.md", page(found))
        print(page(found))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("compare.py: stopped; started again, it goes on behind what is trained")
        sys.exit(STOPPED)
    except (RankError, OSError) as error:
        sys.exit(f"compare.py: error: {error}")
