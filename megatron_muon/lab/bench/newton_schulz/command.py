"""``megatron-muon bench newton-schulz``: speed and accuracy of the iterations."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from megatron_muon.lab.bench.newton_schulz import accuracy as accuracy
from megatron_muon.lab.bench.newton_schulz.ceiling import ceiling_on
from megatron_muon.lab.bench.newton_schulz.peers import Run, peers
from megatron_muon.lab.dry_run.numbers import count
from megatron_muon.lab.writable import require_writable
from megatron_muon.orthogonalize.iteration import ns_flops
from megatron_muon.orthogonalize.matmul import TORCH_DTYPE, numerics_on, said_of_products
from megatron_muon.orthogonalize.newton_schulz import orthogonalize, orthogonalize_at_once
from megatron_muon.settings.coefficients import SETS, CoefficientName, NsDtype, parse, schedule
from megatron_muon.settings.config import MuonConfig, NsIteration
from megatron_muon.settings.update import MOST_STEPS

_DESCRIPTION = """\
Time the Newton-Schulz iterations and, where they can be imported, those of torch.optim.Muon,
emerging_optimizers, dion and gram-newton-schulz. All take the same input and number of steps, one
after the other in rounds whose order rotates. A ratio is standard's time over the row's, as the
median over rounds: above 1 is faster than standard. With --batch N a row takes N matrices one after
the other; rows "at once" take them together, as --muon-ns-batch N does, or as the other package
does.

The ceiling is a plain matmul of two square matrices, a row of its own with the same rounds, device,
threads and dtype (fp32 on a CPU without instructions for the dtype). "of ceiling" is the median
over rounds of a row's flop/s over the ceiling's, where a row's flops are known. A library's
symmetric product counts as 9/16 of a plain one."""
_DTYPE: NsDtype = "bf16"
_ROUNDS = 9


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        0; wrong arguments end the process with status 2, as argparse does.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        measure = _planned(given)
    except ValueError as error:
        parser.error(str(error))
    report = measure()
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-muon bench newton-schulz",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--accuracy", action="store_true", help="print errors in place of times")
    parser.add_argument("--find-restarts", action="store_true", help=argparse.SUPPRESS)  # gone
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=shape_of,
        default=None,
        metavar="ROWSxCOLS",
        help="shapes, short side first (default: 512x512 to 512x4096; accuracy: 64x256)",
    )
    parser.add_argument(
        "--coefficients",
        metavar="SET",
        help="a set's name, or numbers: a,b,c;a,b,c;... (default: simple; accuracy: all)",
    )
    numbers: dict[str, Any] = {"type": count(most=1 << 20), "metavar": "N"}
    steps = count(most=MOST_STEPS)
    parser.add_argument(
        "--steps", type=steps, metavar="N", help="iterations (default: the set's own)"
    )
    parser.add_argument(
        "--dtype", choices=get_args(NsDtype), help=f"dtype (default: {_DTYPE}; accuracy: all)"
    )
    parser.add_argument("--batch", **numbers, help="matrices of a shape (default: 1)")
    parser.add_argument("--rounds", **numbers, help=f"times each row runs (default: {_ROUNDS})")
    parser.add_argument("--device", help="torch's name of the device (default: cpu)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the figures to a file"
    )
    return parser


def _planned(given: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    """The measurement as a function; wrong arguments raise a ValueError before it starts."""
    if given.find_restarts:
        raise ValueError(
            "--find-restarts is no more: in a clone, cd tests && python -m figures.restart_errors "
            "--find"
        )
    for flag in ("batch", "rounds"):
        if given.accuracy and getattr(given, flag) is not None:
            raise ValueError(f"--{flag} has no meaning with --accuracy: leave it out")
    if given.json is not None:
        require_writable("--json", given.json)
    device = device_of(given.device or "cpu")
    if given.accuracy:
        shapes = [(min(shape), max(shape)) for shape in given.shapes or [(64, 256)]]
        dtypes = [given.dtype] if given.dtype else list(get_args(NsDtype))
        return partial(_errors, _names(given), given.steps, shapes, dtypes, device)
    coefficients = parse(given.coefficients or "simple")
    own = SETS[coefficients].steps if isinstance(coefficients, str) else 5
    config = MuonConfig(
        ns_coefficients=coefficients, ns_steps=given.steps or own, ns_dtype=given.dtype or _DTYPE
    )
    numerics_on(device, config)  # raises where a set does not have this number of steps
    return partial(_speeds, given, config, device)


def _names(given: argparse.Namespace) -> list[CoefficientName]:
    name = given.coefficients
    if name is None:
        return list(SETS)
    if name not in SETS:
        raise ValueError(f"--coefficients {name}: one of {', '.join(SETS)} here")
    schedule(name, given.steps or SETS[name].steps, "fp32")  # raises, as in ``_planned``
    return [name]


def _errors(
    names: Sequence[CoefficientName],
    steps: int | None,
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[NsDtype],
    device: torch.device,
) -> dict[str, Any]:
    accuracies = list(accuracy.measured(names, steps, shapes, dtypes, device))
    print(accuracy.table(accuracies))
    return {"shapes": shapes, "rows": accuracy.as_json(accuracies)}


def _speeds(given: argparse.Namespace, config: MuonConfig, device: torch.device) -> dict[str, Any]:
    coefficients, steps = config.ns_coefficients, config.ns_steps
    auto = numerics_on(device, replace(config, ns_iteration="auto"))
    dtype, travels = auto.dtype, TORCH_DTYPE[auto.travels]
    settings = {"ns_coefficients": coefficients, "ns_steps": steps, "ns_dtype": dtype}
    batch, rounds = given.batch or 1, given.rounds or _ROUNDS
    print(
        f"{given.coefficients or 'simple'}, {steps} steps, {dtype}, {device}, "
        f"{torch.get_num_threads()} thread(s); symmetric products: "
        f"{said_of_products(auto)}\n"
    )
    others: dict[str, Run] = {}
    for name, peer in peers(config.ns_coefficients, steps, device, travels):
        if isinstance(peer, str):
            print(f"{name} has no row: {peer}")
        else:
            others[name] = peer
    heads = ["shape", "row", "ms: median (min, max)", "× standard", "Gflop", "Gflop/s"]
    heads.append("of ceiling")
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}", flush=True)
    rows = []
    ceiling = ceiling_on(device, dtype)
    for shape in given.shapes or [(512, 512), (512, 1024), (512, 2048), (512, 4096)]:
        runs, matrices = _runs(shape, batch, settings, others, device)
        runs[ceiling.name] = ceiling, ceiling.flops
        times = interleaved([run for run, _ in runs.values()], matrices, rounds)
        flops = {name: work for name, (_, work) in runs.items()}
        for row in _rows(dict(zip(runs, times, strict=True)), flops, ceiling.name):
            rows.append({"shape": f"{shape[0]}x{shape[1]}", **row})
            print(f"| {' | '.join(_cells(rows[-1]))} |", flush=True)
    where = {"device": str(device), "threads": torch.get_num_threads()}
    return {**settings, **where, "batch": batch, "ceiling": ceiling.name, "rows": rows}


def _cells(row: dict[str, Any]) -> list[str]:
    ms, flops = row["ms"], row["flops"]
    times = f"{ms['median']:.2f} ({ms['min']:.2f}, {ms['max']:.2f})"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    work = ["", "", ""]
    if flops:
        per_second = f"{flops / ms['median'] / 1e6:.0f}"
        work = [f"{flops / 1e9:.2f}", per_second, f"{row['of_ceiling']:.2f}"]
    return [row["shape"], row["name"], times, ratio, *work]


def _runs(
    shape: tuple[int, int],
    count: int,
    settings: dict[str, Any],
    others: dict[str, Run],
    device: torch.device,
) -> tuple[dict[str, tuple[Run, int | None]], Tensor]:
    """The iterations to time for a shape, with their flops if known; and their common input."""
    generator = torch.Generator().manual_seed(0)
    runs: dict[str, tuple[Run, int | None]] = {}
    for iteration in get_args(NsIteration):
        try:
            config = MuonConfig(ns_iteration=iteration, **settings)
        except ValueError as refusal:
            print(f"{iteration}: {refusal}")
            continue
        numerics = numerics_on(device, config)
        flops = count * ns_flops(*shape, numerics)
        runs[iteration] = _one_by_one(partial(orthogonalize, config=config)), flops
        if count > 1:
            runs[f"{iteration}, at once"] = partial(orthogonalize_at_once, config=config), flops
    for name, peer in others.items():
        runs[name] = _one_by_one(peer), None
        if count > 1 and _takes_batches(peer, device):
            runs[f"{name}, at once"] = peer, None
    matrices = torch.randn(count, *shape, generator=generator).to(
        device, TORCH_DTYPE[numerics.travels]
    )
    return runs, matrices


def _rows(
    times: dict[str, list[float]], flops: dict[str, int | None], ceiling: str
) -> Iterator[dict[str, Any]]:
    """A row for JSON from each run's milliseconds; the ceiling has no ratio: its work differs."""
    top = flops[ceiling]
    for name, own in times.items():
        work = flops[name]
        yield {
            "name": name,
            "ms": {"median": statistics.median(own), "min": min(own), "max": max(own)},
            "ratio": None if name == ceiling else _median_ratio(times["standard"], own),
            "flops": work,
            "of_ceiling": work and top and work / top * _median_ratio(times[ceiling], own),
        }


def _median_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """The median over rounds of ``one`` / ``other``."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _one_by_one(run: Run) -> Run:
    return lambda batch: [run(matrix) for matrix in batch]


def _takes_batches(run: Run, device: torch.device) -> bool:
    small = torch.randn(2, 8, 16, device=device, dtype=torch.bfloat16)
    try:
        made = run(small)
    except Exception:  # a package may raise anything for three dimensions
        return False
    return isinstance(made, Tensor) and made.shape == small.shape


def interleaved(
    runs: Sequence[Run],
    matrix: Tensor,
    rounds: int,
    clock: Callable[[], float] | None = None,
) -> list[list[float]]:
    """Milliseconds of each run in each round; the order rotates from round to round.

    Args:
        runs: functions of ``matrix``; each is called once before the rounds.
        matrix: the input of every run.
        rounds: number of rounds.
        clock: a clock in seconds. The default on a GPU is wall time. On a CPU it is the processor
            time of all threads of the process, which leaves out waiting for other processes.
    """
    cuda = matrix.device.type == "cuda"
    clock = clock or (time.perf_counter if cuda else time.process_time)

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize(matrix.device)

    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run(matrix)  # compile, and fill caches
    for number in range(rounds):
        for place in range(len(runs)):
            index = (place + number) % len(runs)
            wait()
            start = clock()
            runs[index](matrix)
            wait()
            times[index].append((clock() - start) * 1e3)
    return times


def device_of(text: str) -> torch.device:
    """The device that torch gives to a name.

    Raises:
        ValueError: it is no CPU and no GPU, or this machine does not have it.
    """
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {text}: cpu, cuda or cuda:N, as torch names them")
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        count = f"{gpus} GPU(s)" if gpus else "no GPU"
        raise ValueError(f"--device {text}: torch sees {count} here")
    return device


def shape_of(text: str) -> tuple[int, int]:
    """Parse a matrix's shape ``ROWSxCOLS``, for argparse."""
    rows, _, cols = text.partition("x")
    try:
        side = count(most=1 << 20)
        return side(rows), side(cols)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"a shape is ROWSxCOLS, got {text!r}: {error}") from None
