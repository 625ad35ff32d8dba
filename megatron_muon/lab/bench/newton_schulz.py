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
    numerics_on,
    said_of_products,
    sums_in_fp32,
)
from megatron_muon.orthogonalize.newton_schulz import (
    orthogonalize,
    orthogonalize_at_once,
)
from megatron_muon.orthogonalize.triton_operations import has_triton
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
    given = parser.parse_args(argv)
    try:
        require_outputs(given)
        device = device_of(given.device)
    except ValueError as error:
        parser.error(str(error))
    write_json(given.json, _report(given, MuonConfig(ns_dtype=given.dtype), device))
    return 0


def _report(
    given: argparse.Namespace, config: MuonConfig, device: torch.device
) -> dict[str, Any]:
    """Print a row for each iteration and shape; return all figures."""
    auto = numerics_on(device, replace(config, ns_iteration="auto"))
    dtype = auto.dtype
    threads = torch.get_num_threads()
    what = (
        f"{config.ns_coefficients}, {config.ns_steps} steps, {dtype}, {device}, "
        f"{threads}"
    )
    show(f"{what} thread(s); symmetric products: {said_of_products(auto)}", "")
    others: dict[str, Run] = {}
    for name, peer in peers(config.ns_steps, device, TORCH_DTYPE[auto.travels]):
        if isinstance(peer, str):
            show(f"{name} has no row: {peer}")
        else:
            others[name] = peer
    rows: list[dict[str, Any]] = []
    ceiling = Ceiling.on(device, dtype)
    for shape in given.shapes:
        runs, matrices = _runs(shape, given.batch, config, others, device)
        runs[ceiling.name] = ceiling, ceiling.flops
        times = interleaved([run for run, _ in runs.values()], matrices, given.rounds)
        flops = {name: work for name, (_, work) in runs.items()}
        name = f"{shape[0]}x{shape[1]}"
        own = list(_rows(dict(zip(runs, times, strict=True)), flops, ceiling.name))
        rows += [{"shape": name, **row} for row in own]
        print("\n".join(["", name, *aligned([_HEADS, *map(_cells, own)])]), flush=True)
    return {
        "ns_coefficients": config.ns_coefficients,
        "ns_steps": config.ns_steps,
        "ns_dtype": dtype,
        "device": str(device),
        "threads": threads,
        "batch": given.batch,
        "ceiling": ceiling.name,
        "rows": rows,
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


def _runs(
    shape: tuple[int, int],
    batch: int,
    settings: MuonConfig,
    others: dict[str, Run],
    device: torch.device,
) -> tuple[dict[str, tuple[Run, int | None]], Tensor]:
    """The iterations to time for a shape, with their flops if known; and their common
    input.
    """
    runs: dict[str, tuple[Run, int | None]] = {}
    for name, config in _configs(device, settings):
        numerics = numerics_on(device, config)
        flops = batch * ns_flops(*shape, numerics)
        runs[name] = _one_by_one(partial(orthogonalize, config=config)), flops
        if batch > 1:
            runs[f"{name}, at once"] = (
                partial(orthogonalize_at_once, config=config),
                flops,
            )
    for name, peer in others.items():
        runs[name] = _one_by_one(peer), None
        if batch > 1 and _takes_batches(peer, device):
            runs[f"{name}, at once"] = peer, None
    matrices = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
    return runs, matrices.to(device, TORCH_DTYPE[numerics.travels])


def _configs(
    device: torch.device, settings: MuonConfig
) -> Iterator[tuple[str, MuonConfig]]:
    """The settings to time, by name: each iteration, and with triton's products on a
    GPU.
    """
    for iteration in get_args(NsIteration):
        config = MuonConfig(ns_iteration=iteration, ns_dtype=settings.ns_dtype)
        yield iteration, config
        if device.type == "cuda" and has_triton():
            by_triton = replace(config, symmetric_products="triton")
            yield f"{iteration}, symmetric by triton", by_triton


def _one_by_one(run: Run) -> Run:
    return lambda batch: [run(matrix) for matrix in batch]


def _takes_batches(run: Run, device: torch.device) -> bool:
    small = torch.randn(2, 8, 16, device=device, dtype=torch.bfloat16)
    try:
        made = run(small)
    except Exception:  # a package may raise anything for three dimensions
        return False
    return isinstance(made, Tensor) and made.shape == small.shape


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A product of two square matrices by torch: the bound of Newton-Schulz's speed.

    ``dtype`` is the one in which Newton-Schulz multiplies on their device.
    """

    left: Tensor
    right: Tensor
    dtype: NsDtype

    @staticmethod
    def on(device: torch.device, dtype: NsDtype) -> Ceiling:
        """The ceiling on a device, for Newton-Schulz in a dtype."""
        size = _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
        held = numerics_on(device, MuonConfig(ns_dtype=dtype)).held
        numbers = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = {"device": device, "dtype": TORCH_DTYPE[held]}
        left, right = (
            torch.randn(size, size, generator=numbers, **options) for _ in range(2)
        )
        return Ceiling(left, right, held)

    @property
    def name(self) -> str:
        size = self.left.size(0)
        return f"matmul {size}x{size}, {self.dtype}"

    @property
    def flops(self) -> int:
        return 2 * self.left.size(0) ** 3

    def __call__(self, _: Tensor) -> Tensor:
        """Compute the product; the argument, which every run of the bench gets, is
        ignored.
        """
        with sums_in_fp32(self.left.device):
            return torch.mm(self.left, self.right)


def _rows(
    times: dict[str, list[float]], flops: dict[str, int | None], ceiling: str
) -> Iterator[dict[str, Any]]:
    """A row for JSON from each run's milliseconds; the ceiling has no ratio: its work
    differs.
    """
    top = flops[ceiling]
    for name, own in times.items():
        work = flops[name]
        yield {
            "name": name,
            "ms": {"median": statistics.median(own), "min": min(own), "max": max(own)},
            "ratio": None if name == ceiling else _median_ratio(times["standard"], own),
            "flops": work,
            "of_ceiling": work
            and top
            and work / top * _median_ratio(times[ceiling], own),
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
