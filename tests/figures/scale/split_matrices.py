"""What it would gain to orthogonalize one matrix on several ranks.

``cd tests && python -m figures.scale.split_matrices [WORD ...]``

Prices Newton-Schulz of the largest matrices of ``CASES`` on s ranks of one node, or of several
(``--far``), each of which has a strip, a range of the long side, in two ways:

whole squares
    each rank forms the square of its strip; these are added; every rank makes all products of
    squares, and multiplies its strip.
rows
    each rank makes its rows of every product of squares, which are put together.

``orthogonalize.iteration.makes_rows`` says which of them a run takes. The first has the Gram
iteration or the standard one, as the whole matrix has; the second always Gram. Every restart needs
the square again. Messages wait for products and products for them, so nothing hides them.

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
from megatron_muon.lab.dry_run.stages import planned_on
from megatron_muon.lab.plan.options import command_line
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.kernels import newton_schulz, newton_schulz_strip
from megatron_muon.lab.pricing.presets import hardware_of
from megatron_muon.lab.routes.model_flags import megatron_is_quiet
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.settings.config import MuonConfig
from support.small_squares import rows_of_small_squares
from support.virtual_gpu.plans import LLAMA_8B, LLAMA_70B, LLAMA_405B, OVERLAP

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
    Case(
        "Llama-3-405B TP8 PP14 DP128",
        LLAMA_405B + f"{TP} 8 --pipeline-model-parallel-size 14 --world-size 14336",
        1,
    ),
    Case("DeepSeek-V3 PP16 EP64, 1,024 GPUs", DEEPSEEK_V3 + "--world-size 1024", 1),
)


@dataclass(frozen=True, slots=True)
class Shared:
    """Newton-Schulz of one matrix on several ranks, in seconds on each.

    Attributes:
        squares, rows: products and messages, see the module.
    """

    squares: float
    rows: float


def shared(hardware: Hardware, rows: int, cols: int, ranks: int, config: MuonConfig) -> Shared:
    """The time of a matrix on ``ranks`` ranks, by a library's symmetric kernel where it applies."""

    numerics = Numerics(config, "cuda_symmetric")

    def priced(least: int) -> float:
        strip = (rows, cols), max(rows, cols) // ranks, ranks, ranks
        with rows_of_small_squares(least):
            return newton_schulz_strip(hardware, *strip, numerics).seconds

    return Shared(priced(1 << 30), priced(1))


def _sizes(words: list[str], config: MuonConfig) -> Iterator[tuple[int, int]]:
    """Rows and columns of every matrix of a stage."""
    line = command_line(words)
    run, stage = line.settled(), line.given.stage
    with megatron_is_quiet():
        (planned,) = planned_on(["cuda_symmetric"], run.flags, run.config, run.ranks, stage)
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
    heads = [f"{kind} {ranks}" for ranks in SHARERS for kind in ("squares", "rows")]
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
            size: newton_schulz(hardware, *size, 1, Numerics(config, "cuda_symmetric")).seconds
            for size in set(sizes)
        }
        cells.append(_ms(sum(times[size] for size in sizes) / stage.ranks))
        for size in sorted(times, key=lambda size: -times[size])[:3]:
            split = [shared(hardware, *size, ranks, config) for ranks in SHARERS]
            both = [_ms(t) for one in split for t in (one.squares, one.rows)]
            row = [*cells, f"{size[0]}x{size[1]}", _ms(times[size]), *both]
            print(f"| {' | '.join(row)} |", flush=True)
            cells = ["", "", ""]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


if __name__ == "__main__":
    main()
