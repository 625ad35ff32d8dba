"""What it would gain to orthogonalize one matrix on several ranks.

``cd tests && python -m figures.scale.split_matrices [WORD ...]``

Prices Newton-Schulz of the largest matrices of ``CASES`` on s ranks of one node, or of several
(``--far``), each of which has a block of the long side, in two ways:

replicated
    each rank forms its part of the Gram matrix; an all-reduce in fp32 adds the parts; every rank
    makes all products of squares, and multiplies its block.
by rows
    a reduce-scatter adds the parts; each rank makes its rows of every square product, which an
    all-gather in the matrices' dtype puts together.

Every restart of the Gram iteration needs the square again. Collectives wait for products and
products for them, so nothing hides them. A ring moves (s - 1) / s of the square once for a
reduce-scatter or an all-gather, twice for an all-reduce.

The busiest rank then has at least the largest share or the mean, whichever is more. ``mean`` is
Newton-Schulz of all matrices, unsplit, over the ranks of the stage. ``step`` is the whole step with
matrices that are whole.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from figures.priced_models import DEEPSEEK_V3, TP, Case
from figures.priced_stages import priced_of
from megatron_muon.cli.model_flags import imported_config_class, megatron_is_quiet, settled
from megatron_muon.cli.plan.options import parser as plan_parser
from megatron_muon.config import MuonConfig
from megatron_muon.dry_run.stages import planned_on
from megatron_muon.orthogonalize.iteration import itemsize_of, segments
from megatron_muon.pricing.hardware import MICRO, Hardware
from megatron_muon.pricing.kernels import _Products, newton_schulz, product
from megatron_muon.pricing.presets import hardware_of
from support.virtual_gpu.plans import LLAMA_8B, LLAMA_70B, OVERLAP

SHARERS = (2, 4, 8)
CASES = (
    Case("Llama-3-8B TP1 × DP64", LLAMA_8B + "--world-size 64"),
    Case("Llama-3-8B TP1 × DP512", LLAMA_8B + "--world-size 512"),
    Case("Llama-3-8B TP8 × DP64", LLAMA_8B + f"{TP} 8 --world-size 512"),
    Case(
        "Llama-3-70B TP8 PP4 DP64",
        LLAMA_70B + f"{TP} 8 --pipeline-model-parallel-size 4 --world-size 2048",
        1,
    ),
    Case("DeepSeek-V3 PP16 EP64, 1,024 GPUs", DEEPSEEK_V3 + "--world-size 1024", 1),
)


@dataclass(frozen=True, slots=True)
class Shared:
    """Newton-Schulz of one matrix on several ranks, in seconds on each.

    Attributes:
        replicated, by_rows: products and collectives, see the module.
    """

    replicated: float
    by_rows: float


def shared(hardware: Hardware, rows: int, cols: int, ranks: int, config: MuonConfig) -> Shared:
    """The time of a matrix on ``ranks`` ranks, by a library's symmetric kernel where it applies."""
    short, long = min(rows, cols), -(-max(rows, cols) // ranks)
    itemsize = itemsize_of(config)
    work = _Products.of(hardware, (rows, cols), long, 1, config, "cuda_symmetric")
    square = short * short
    once = _collective(hardware, square * itemsize, ranks)
    in_fp32 = _collective(hardware, square * 4, ranks)
    replicated = by_rows = _norm(hardware, rows * cols // ranks)
    part_of_product = product(hardware, -(-short // ranks), short, short, 1, itemsize).seconds
    for part in segments(config, "cuda_symmetric"):
        squared = [c != 0 for _, _, c in part]
        gram = work.gram_segment([]).seconds  # XXᵀ and QX
        products = work.gram_segment(squared).seconds - gram
        count = sum(squared) + 3 * (len(part) - 1)
        replicated += gram + 2 * in_fp32 + products
        by_rows += gram + in_fp32 + once + count * (part_of_product + once)
    return Shared(replicated, by_rows)


def _norm(hardware: Hardware, elements: int) -> float:
    return 6 * elements / hardware.memory + (3 * hardware.kernel_us + _latency(hardware)) * MICRO


def _collective(hardware: Hardware, nbytes: float, ranks: int) -> float:
    """A reduce-scatter or an all-gather of ``nbytes`` in all over a ring."""
    moved = nbytes * (ranks - 1) / ranks
    return moved / hardware.node_link + _latency(hardware) * MICRO


def _latency(hardware: Hardware) -> float:
    return hardware.message_us + 2 * hardware.peer_us


def _sizes(words: list[str], config: MuonConfig) -> Iterator[tuple[int, int]]:
    """Rows and columns of every matrix of a stage."""
    given = plan_parser(imported_config_class("figures.scale.split_matrices")).parse_args(words)
    run = settled(given)
    with megatron_is_quiet():
        (planned,) = planned_on(["cuda_symmetric"], given, run.config, run.ranks, given.stage)
    for optimizer in planned:
        for matrix in optimizer.plan.matrices:
            for _ in range(matrix.units):
                yield matrix.unit


def main() -> None:
    """Print a row for each of a model's three largest matrices."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--far", action="store_true", help="the ranks are on several nodes")
    given = parser.parse_args()
    hardware = hardware_of(given.hardware, [])
    if given.far:
        far = {"gbytes": hardware.network_gbytes, "efficiency": hardware.network_efficiency}
        hardware = dataclasses.replace(hardware, **{f"node_{k}": v for k, v in far.items()})
    config = MuonConfig()
    heads = [f"{kind} {ranks}" for ranks in SHARERS for kind in ("replicated", "by rows")]
    print(f"| ms | step | mean | matrix | whole | {' | '.join(heads)} |")
    print("|---|--:|--:|---" + "|--:" * (1 + len(heads)) + "|")
    for case in CASES:
        if given.words and not any(word in case.name for word in given.words):
            continue
        words = f"{case.words} {OVERLAP} --stage {case.stage} --muon-split-matrices off".split()
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (stage,), _ = priced_of(words, hardware)
            sizes = list(_sizes(words, config))
        cells = [case.name, _ms(stage.ours[-1].step.seconds)]
        times = {
            size: newton_schulz(hardware, *size, 1, config, "cuda_symmetric").seconds
            for size in set(sizes)
        }
        cells.append(_ms(sum(times[size] for size in sizes) / stage.ranks))
        for size in sorted(times, key=lambda size: -times[size])[:3]:
            split = [shared(hardware, *size, ranks, config) for ranks in SHARERS]
            both = [_ms(t) for one in split for t in (one.replicated, one.by_rows)]
            row = [*cells, f"{size[0]}x{size[1]}", _ms(times[size]), *both]
            print(f"| {' | '.join(row)} |", flush=True)
            cells = ["", "", ""]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


if __name__ == "__main__":
    main()
