"""``megatron-muon bench newton-schulz``: speed of the iterations, and of other
packages'.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from megatron_muon.lab.bench.peers import Run, peers
from megatron_muon.lab.dry_run.numbers import count
from megatron_muon.lab.outputs import (
    add_outputs,
    parser_of,
    require_outputs,
    write_json,
)
from megatron_muon.lab.progress import progress
from megatron_muon.lab.tables import aligned, show
from megatron_muon.orthogonalize.iteration import ns_flops
from megatron_muon.orthogonalize.matmul import (
    TORCH_DTYPE,
    describe_products,
    numerics_on,
    sums_in_fp32,
)
from megatron_muon.orthogonalize.newton_schulz import (
    orthogonalize,
    orthogonalize_at_once,
)
from megatron_muon.settings.coefficients import NsDtype
from megatron_muon.settings.config import MuonConfig, NsIteration

_DESCRIPTION = """\
Time the Newton-Schulz iterations and, where they can be imported, those of
torch.optim.Muon, emerging_optimizers, dion and gram-newton-schulz, with the
coefficients and steps that are Muon's default. All take the same input, one
after the other in rounds whose order rotates. A ratio is standard's time over
the row's, as the median over rounds: above 1 is faster than standard. With
--batch N a row takes N matrices one after the other; rows "at once" take them
together, as a step does (a CPU multiplies each alone), or as the other package
does.

The ceiling is a plain matmul of two square matrices, a row of its own with the
same rounds, device, threads and dtype (fp32 on a CPU without instructions for
the dtype). "of ceiling" is the median over rounds of a row's flop/s over the
ceiling's, where a row's flops are known. A library's symmetric product counts
as 9/16 of a plain one."""
_SHAPES = ((512, 512), (512, 1024), (512, 2048), (512, 4096))
_HEADS = ("row", "ms", "(min to max)", "× standard", "Gflop", "Gflop/s", "of ceiling")
# Rows of the ceiling's matrices: on a CPU so many that more are not faster, and few
# enough for a product in every round. Measured on one thread with AVX512_BF16; not
# measured on a GPU.
_CPU_SIZE, _GPU_SIZE = 1024, 8192


def main(argv: Sequence[str]) -> int:
    """Run the command; wrong arguments end the process with status 2, as argparse
    does.
    """
    parser = parser_of("megatron-muon bench newton-schulz", _DESCRIPTION)
    add = parser.add_argument
    numbers: dict[str, Any] = {"type": count(most=1 << 20), "metavar": "N"}
    text = "shapes, short side first (default: 512x512 to 512x4096)"
    add(
        "--shapes",
        nargs="+",
        type=shape_of,
        default=_SHAPES,
        metavar="ROWSxCOLS",
        help=text,
    )
    add(
        "--dtype", choices=get_args(NsDtype), default="bf16", help="dtype (%(default)s)"
    )
    add("--batch", **numbers, default=1, help="matrices of a shape (%(default)s)")
    add("--rounds", **numbers, default=9, help="times each row runs (%(default)s)")
    add("--device", default="cpu", help="torch's name of the device (%(default)s)")
    add_outputs(parser)
    args = parser.parse_args(argv)
    try:
        require_outputs(args)
        device = device_of(args.device)
    except ValueError as error:
        parser.error(str(error))
    write_json(args.json, _report(args, MuonConfig(ns_dtype=args.dtype), device))
    return 0


@dataclass(frozen=True, slots=True)
class _Row:
    """Something to time."""

    name: str
    run: Run
    flops: int | None = None  # where they are known


def _report(
    args: argparse.Namespace, config: MuonConfig, device: torch.device
) -> dict[str, Any]:
    """Print a row for each iteration and shape; return all figures."""
    auto = numerics_on(device, replace(config, ns_iteration="auto"))
    threads = torch.get_num_threads()
    show(
        f"{config.ns_coefficients}, {config.ns_steps} steps, {auto.dtype}, {device}, "
        f"{threads} thread(s); symmetric products: {describe_products(auto)}",
        "",
    )
    others: dict[str, Run] = {}
    for name, peer in peers(config.ns_steps, device, TORCH_DTYPE[auto.travels]):
        if isinstance(peer, str):
            show(f"{name} has no row: {peer}")
        else:
            others[name] = peer
    figures: list[dict[str, Any]] = []
    top = ceiling(device, auto.dtype)
    for shape in args.shapes:
        rows = [*_rows(shape, args.batch, config, others, device), top]
        numbers = torch.Generator().manual_seed(0)
        matrices = torch.randn(args.batch, *shape, generator=numbers)
        matrices = matrices.to(device, TORCH_DTYPE[auto.travels])
        times = interleaved([row.run for row in rows], matrices, args.rounds)
        shown = list(_figures(rows, times))
        name = f"{shape[0]}x{shape[1]}"
        figures += [{"shape": name, **row} for row in shown]
        print(
            "\n".join(["", name, *aligned([_HEADS, *map(_cells, shown)])]), flush=True
        )
    return {
        "ns_coefficients": config.ns_coefficients,
        "ns_steps": config.ns_steps,
        "ns_dtype": auto.dtype,
        "device": str(device),
        "threads": threads,
        "batch": args.batch,
        "ceiling": top.name,
        "rows": figures,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    ms, flops = row["ms"], row["flops"]
    times = [f"{ms['median']:.2f}", f"({ms['min']:.2f} to {ms['max']:.2f})"]
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    work = ["", "", ""]
    if flops:
        per_second = f"{flops / ms['median'] / 1e6:.0f}"
        work = [f"{flops / 1e9:.2f}", per_second, f"{row['of_ceiling']:.2f}"]
    return [row["name"], *times, ratio, *work]


def _rows(
    shape: tuple[int, int],
    batch: int,
    settings: MuonConfig,
    others: dict[str, Run],
    device: torch.device,
) -> Iterator[_Row]:
    """The iterations to time for a shape; ``standard`` is the first."""
    for iteration in get_args(NsIteration):
        config = replace(settings, ns_iteration=iteration)
        flops = batch * ns_flops(*shape, numerics_on(device, config))
        one = partial(orthogonalize, config=config)
        yield _Row(iteration, _one_by_one(one), flops)
        if batch > 1:
            at_once = partial(orthogonalize_at_once, config=config)
            yield _Row(f"{iteration}, at once", at_once, flops)
    for name, peer in others.items():
        yield _Row(name, _one_by_one(peer))
        if batch > 1 and _takes_batches(peer, device):
            yield _Row(f"{name}, at once", peer)


def _one_by_one(run: Run) -> Run:
    return lambda batch: [run(matrix) for matrix in batch]


def _takes_batches(run: Run, device: torch.device) -> bool:
    small = torch.randn(2, 8, 16, device=device, dtype=torch.bfloat16)
    try:
        result = run(small)
    except Exception:  # a package may raise anything for three dimensions
        return False
    return isinstance(result, Tensor) and result.shape == small.shape


def ceiling(device: torch.device, dtype: NsDtype) -> _Row:
    """A product of two square matrices by torch: the bound of Newton-Schulz's speed.

    They are in the dtype in which Newton-Schulz multiplies on this device.
    """
    size = _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
    held = numerics_on(device, MuonConfig(ns_dtype=dtype)).held
    numbers = torch.Generator(device).manual_seed(0)
    both = torch.randn(2, size, size, generator=numbers, device=device)
    left, right = both.to(TORCH_DTYPE[held])

    def product(_: Tensor) -> Tensor:  # whatever the matrix of the other rows is
        with sums_in_fp32(device):
            return torch.mm(left, right)

    return _Row(f"matmul {size}x{size}, {held}", product, 2 * size**3)


def _figures(
    rows: Sequence[_Row], times: Sequence[list[float]]
) -> Iterator[dict[str, Any]]:
    """A row for JSON from the milliseconds of each; the first one is ``standard``, the
    last one the ceiling, which has no ratio, since its work differs.
    """
    top = rows[-1].flops
    for row, ms in zip(rows, times, strict=True):
        of_ceiling = None
        if row.flops is not None and top is not None:
            of_ceiling = row.flops / top * _median_ratio(times[-1], ms)
        yield {
            "name": row.name,
            "ms": {"median": statistics.median(ms), "min": min(ms), "max": max(ms)},
            "ratio": None if row is rows[-1] else _median_ratio(times[0], ms),
            "flops": row.flops,
            "of_ceiling": of_ceiling,
        }


def _median_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """The median over rounds of ``one`` / ``other``."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def interleaved(
    runs: Sequence[Run],
    matrix: Tensor,
    rounds: int,
    clock: Callable[[], float] | None = None,
) -> list[list[float]]:
    """Milliseconds of each run in each round; the order rotates from round to round.

    By default the clock is wall time on a GPU. On a CPU it is the processor time of all
    threads of the process, which leaves out waiting for other processes.
    """
    cuda = matrix.device.type == "cuda"
    clock = clock or (time.perf_counter if cuda else time.process_time)

    def now() -> float:
        if cuda:
            torch.cuda.synchronize(matrix.device)
        return clock()

    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run(matrix)  # compile, and fill caches
    for number in progress(range(rounds), "rounds"):
        for place in range(len(runs)):
            index = (place + number) % len(runs)
            start = now()
            runs[index](matrix)
            times[index].append((now() - start) * 1e3)
    return times


def device_of(text: str) -> torch.device:
    """The device that torch gives to a name; a ValueError if it is not here, or no CPU
    or GPU.
    """
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {text}: cpu, cuda or cuda:N, as torch names them")
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ValueError(
            f"--device {text}: torch sees {f'{gpus} GPU(s)' if gpus else 'no GPU'}"
        )
    return device


def shape_of(text: str) -> tuple[int, int]:
    """Parse a matrix's shape ``ROWSxCOLS``, for argparse."""
    rows, _, cols = text.partition("x")
    try:
        side = count(most=1 << 20)
        return side(rows), side(cols)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"a shape is ROWSxCOLS, got {text!r}: {error}"
        ) from None
