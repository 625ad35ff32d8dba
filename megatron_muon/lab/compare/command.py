"""``megatron-muon compare``: AdamW and Muon train the same model over several topologies."""

from __future__ import annotations

import argparse
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import megatron_muon
from megatron_muon.files.writable import require_writable
from megatron_muon.lab.compare.topology import USUAL, Topology, parsed
from megatron_muon.lab.dry_run.numbers import count, positive, up_to
from megatron_muon.lab.plan.charts import require_chart
from megatron_muon.orthogonalize.iteration import Device

_DESCRIPTION = """\
Train one small GPT with AdamW and with Muon over several topologies, on ranks of this machine: over
NCCL with GPUs, over gloo without. Write a report of times, of bytes beside AdamW's, of memory
measured and planned, and of losses. It also says at which bandwidth Muon's advantage ends: by a
model, and measured where links between network namespaces can be slowed down.

Under torchrun (RANK and WORLD_SIZE are set), every rank runs this command, and the topologies that
have as many ranks are compared. --nodes N checks that the launcher has N nodes; without a launcher
it prints the commands for torchrun and sbatch: see docs/compare.md."""

_EPILOG = """\
Further flags are Megatron-LM's, of the model: --group-query-attention, --swiglu, --num-experts, ...
A training whose measurements are in --folder, with the same flags on the same machine and versions,
is not repeated. Exit status: 0; 1 where a rank failed or a file could not be written; 2 where
arguments are wrong."""

_LINKS = (1000.0, 100.0, 30.0)  # Mbit/s
_SIZES: dict[str, Any] = {"type": count(most=1 << 24), "metavar": "N"}


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        0, or 1 where a rank failed or a file could not be written; wrong arguments end the process
        with 2.
    """
    from megatron_muon.lab.compare.jobs import jobs_over
    from megatron_muon.lab.routes.model_flags import megatron_is_quiet
    from megatron_muon.mcore.seams.rows import SeamError, check_part

    parser = command_parser()
    given, of_megatron = parser.parse_known_args(argv)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if given.nodes is not None:
        _check_nodes(parser, given, argv, launched)
    with megatron_is_quiet():
        if not megatron_muon.cpu.enabled():
            _enable_cpu(launched)
        try:
            check_part("dry_run", "bench")
            topologies = [parsed(each) for each in given.topologies or USUAL]
            if launched:
                topologies = _of_world(topologies, int(os.environ["WORLD_SIZE"]))
            jobs = {
                topology: jobs_over(topology, given, of_megatron, parser.prog)
                for topology in topologies
            }
            given.folder.mkdir(parents=True, exist_ok=True)
            require_writable("--folder", given.folder / "report.md")
            if given.plot is not None:
                require_writable("--plot", given.plot)
                require_chart("--plot", given.plot)
            given.link_mbits, why_not = _links(given.link_mbits, launched)
        except (ValueError, TypeError, AssertionError, OSError, SeamError) as error:
            parser.error(" ".join(str(error).split()) or f"Megatron refuses this: {error!r}")
    from megatron_muon.lab.bench.ranks import RankError

    try:
        return _compare(given, argv, jobs, launched, why_not)
    except (RankError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1


def _check_nodes(
    parser: argparse.ArgumentParser, given: Namespace, argv: Sequence[str], launched: bool
) -> None:
    """End with what is wrong, or with the commands that start as many nodes; one may be this."""
    import torch

    from megatron_muon.lab.compare.nodes import how_to_start, require_nodes

    try:
        if launched:
            require_nodes(given.nodes, os.environ)
            return
        if given.nodes == 1:
            return
        topologies = [parsed(each) for each in given.topologies or ()]
        batch = (given.micro_batch_size, given.global_batch_size)
        text = how_to_start(
            given.nodes, topologies, argv, str(given.folder), batch, torch.cuda.device_count()
        )
    except ValueError as error:
        text = str(error)
    parser.error(text)


def _links(asked: Sequence[float] | None, launched: bool) -> tuple[list[float], str | None]:
    """The rates that are measured, and why there are none.

    Raises:
        ValueError: rates were asked for and cannot be measured here; says why.
    """
    import torch

    from megatron_muon.lab.compare.links import why_not

    if asked is not None and not asked:
        return [], "--link-mbits names no rate"
    if launched:
        reason: str | None = "a launcher has started the ranks, where it wants them"
    elif torch.cuda.device_count():
        reason = "NCCL's ranks on one machine send over no network"
    else:
        reason = why_not()
    if reason is None:
        return list(dict.fromkeys(asked or _LINKS)), None
    if asked:
        raise ValueError(f"--link-mbits cannot be measured here: {reason}")
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"slow links are modelled, not measured: {reason}", file=sys.stderr, flush=True)
    return [], reason


def _enable_cpu(launched: bool) -> None:
    """This process starts ranks, or is one where a launcher has started it."""
    import torch

    if not (launched and torch.cuda.is_available()):
        megatron_muon.cpu.enable(allow_cuda=True)


def _of_world(topologies: Sequence[Topology], world: int) -> list[Topology]:
    fitting = [each for each in topologies if each.world == world]
    if not fitting:
        raise ValueError(
            f"the launcher has started {world} ranks, and no topology of "
            f"{', '.join(map(str, topologies))} has as many: see --topologies"
        )
    return fitting


def _compare(
    given: Namespace,
    argv: Sequence[str],
    jobs: dict[Topology, dict[str, Any]],
    launched: bool,
    no_links: str | None,
) -> int:
    from megatron_muon.lab.compare.compared import Compared, OverLinks
    from megatron_muon.lab.compare.figures import figures
    from megatron_muon.lab.compare.predicted import TrainingRun, predicted
    from megatron_muon.lab.compare.report import page
    from megatron_muon.lab.compare.training import leave_launched_world
    from megatron_muon.lab.routes.model_flags import megatron_is_quiet

    device = _device()
    with megatron_is_quiet():  # it makes groups of its own, so it comes before the launcher's
        planned = {
            topology: predicted(
                TrainingRun(both["muon"].flags, both["muon"].row.config),
                TrainingRun(both["adamw"].flags, both["adamw"].row.config),
                device,
            )
            for topology, both in jobs.items()
        }
    trained, agreed = _launched_ranks() if launched else (_own_ranks(given), lambda each: each)
    where = _where()

    def both_over(topology: Topology, mbits: float | None) -> dict[str, Any]:
        made = {}
        for optimizer, job in jobs[topology].items():
            path = given.folder / f"{_file_name(topology, optimizer, mbits)}.json"
            job = replace(job, link_mbits=mbits)
            made[optimizer] = figures(optimizer, _measured(path, job, where, trained, agreed))
        return made

    compared = []
    for topology in jobs:
        links = [OverLinks(mbits, **both_over(topology, mbits)) for mbits in given.link_mbits]
        free = both_over(topology, None)
        compared.append(Compared(topology, **free, predicted=planned[topology], links=tuple(links)))
    if launched:
        leave_launched_world()
    if int(os.environ.get("RANK", "0")) == 0 or not launched:
        run = _run_of(given, argv, where) | {"planned_for": device, "no_links": no_links}
        text = page.as_markdown(run, compared)
        (given.folder / "report.md").write_text(text)
        written = json.dumps(page.as_json(run, compared), indent=1) + "\n"
        (given.folder / "report.json").write_text(written)
        if given.plot is not None:
            from megatron_muon.lab.compare.report.figure import draw

            draw(compared, given.plot)
        print(text)
    return 0


def _device() -> Device:
    """The kind of device of every rank."""
    import torch

    from megatron_muon.orthogonalize.matmul import plan_device

    return plan_device(torch.device("cuda" if torch.cuda.device_count() else "cpu"))


def _file_name(topology: Topology, optimizer: str, mbits: float | None) -> str:
    return f"{topology}-{optimizer}" + ("" if mbits is None else f"-{mbits:g}mbit")


def _measured(
    path: Path,
    job: Any,
    where: dict[str, str],
    trained: Callable[[Any], Any],
    agreed: Callable[[Any], Any],
) -> Any:
    """The measurements of a training: read where they are there, else made and written.

    Args:
        path: their file.
        job: the training.
        where: see ``_where``.
        trained: makes them.
        agreed: what rank 0 has read, on every rank: others may not see its files.
    """
    from megatron_muon.lab.compare.store import digest, read, write

    known = digest(job, where)
    ranks = agreed(read(path, known))
    if ranks is not None:
        return ranks
    is_first = int(os.environ.get("RANK", "0")) == 0
    if is_first:
        print(f"training {path.stem}", file=sys.stderr, flush=True)
    ranks = trained(job)
    if is_first:
        write(path, known, ranks)
    return ranks


def _own_ranks(given: Namespace) -> Callable[[Any], Any]:
    """Ranks that this process starts."""
    from megatron_muon.lab.bench.ranks import Task, gpus_for, run_ranks, threads_for
    from megatron_muon.lab.compare import links
    from megatron_muon.lab.compare.training import train
    from megatron_muon.lab.dry_run.model import ranks_of

    def trained(job: Any) -> Any:
        world = ranks_of(job.flags).world
        gpus = gpus_for(world, "a topology", "--topologies")
        threads = threads_for(world, given.threads)
        task = Task(train, job, world, gpus, threads, 60 * given.minutes, builds=True)
        if job.link_mbits is None:
            return run_ranks(task)
        with links.shaped(world, job.link_mbits) as namespaces:
            return run_ranks(replace(task, before=partial(links.enter, namespaces)))

    return trained


def _launched_ranks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """The launcher's ranks, of which this process is one, and their agreement on what was read."""
    import torch

    from megatron_muon.lab.compare.training import first_ranks, train_in_launched_world

    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.init_process_group("nccl" if gpus else "gloo")
    return train_in_launched_world, first_ranks


def _where() -> dict[str, str]:
    """Versions and devices: a measurement depends on them beside its flags."""
    import torch

    from megatron_muon.mcore.seams.rows import megatron_version

    device = torch.cuda.get_device_name() if torch.cuda.device_count() else "CPU over gloo"
    return {
        "device": device,
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "megatron-core": megatron_version()[0],
        "megatron_muon": megatron_muon.__version__,
    }


def _run_of(given: Namespace, argv: Sequence[str], where: dict[str, str]) -> dict[str, Any]:
    versions = ", ".join(
        f"{name} {where[name]}" for name in ("torch", "megatron-core", "megatron_muon")
    )
    return {
        "arguments": list(argv),
        "model": f"{given.layers} layers, hidden {given.hidden}, vocabulary {given.vocab}, "
        f"{given.global_batch_size} sequences of {given.seq} a step",
        "ranks": f"{where['device']}, {where['cores']} cores of the first machine",
        "versions": versions,
    }


def command_parser() -> argparse.ArgumentParser:
    """The parser of this command's own flags, with its help."""
    parser = argparse.ArgumentParser(
        prog="megatron-muon compare",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--topologies",
        nargs="+",
        metavar="SIZES",
        help=f"topologies, such as tp2-pp2-dp2 (default: {' '.join(USUAL)})",
    )
    parser.add_argument(
        "--nodes",
        type=count(most=1 << 16),
        metavar="N",
        help="check that the launcher has started ranks on N nodes; without a launcher and above "
        "1, print the commands that start them",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("compare"),
        help="folder of the measurements, report.md and report.json (%(default)s)",
    )
    _add_training(parser)
    rates = " ".join(f"{rate:g}" for rate in _LINKS)
    parser.add_argument(
        "--link-mbits",
        nargs="*",
        type=up_to(100_000, least=0.1),
        metavar="RATE",
        help="also measure over links of these rates, in Mbit/s; it needs root on Linux, and gloo; "
        f"with no rate the report has the model alone (default: {rates} where allowed)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw bars (png, svg, pdf)")
    parser.add_argument("--threads", **_SIZES, help="threads per rank (default: cores/ranks)")
    parser.add_argument(
        "--minutes",
        type=up_to(100_000, least=0.01),
        default=30,
        metavar="N",
        help="minutes until a training is given up (%(default)s)",
    )
    return parser


def _add_training(parser: argparse.ArgumentParser) -> None:
    """The flags of each training: steps, rates, sizes."""
    steps = count(3, 1 << 20)
    rate: dict[str, Any] = {"type": positive, "metavar": "LR"}
    parser.add_argument(
        "--steps", type=steps, default=12, metavar="N", help="steps of a training (%(default)s)"
    )
    parser.add_argument("--lr-adamw", **rate, default=2e-3, help="AdamW's rate (%(default)s)")
    parser.add_argument("--lr-muon", **rate, default=1e-2, help="Muon's rate (%(default)s)")
    parser.add_argument("--hidden", **_SIZES, default=256, help="hidden size (%(default)s)")
    parser.add_argument("--layers", **_SIZES, default=4, help="number of layers (%(default)s)")
    parser.add_argument("--seq", **_SIZES, default=128, help="tokens of a sequence (%(default)s)")
    parser.add_argument(
        "--vocab", **_SIZES, default=4096, help="size of the vocabulary (%(default)s)"
    )
    parser.add_argument("--heads", **_SIZES, help="attention heads (default: hidden / 64)")
    parser.add_argument("--ffn", **_SIZES, help="inner size of an MLP (default: 4 x hidden)")
    parser.add_argument(
        "--micro-batch-size", **_SIZES, default=2, help="sequences of a micro-batch (%(default)s)"
    )
    parser.add_argument(
        "--global-batch-size", **_SIZES, default=16, help="sequences of a step (%(default)s)"
    )
