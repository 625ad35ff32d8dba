"""Steps with long matrices on one home each, and on several: their predicted times.

``cd tests && python -m figures.scale.shared_steps [WORD ...]``

Prices stages of ``figures.priced_models`` and larger ones with
``--muon-split-matrices`` off, 2, 4, 8 and auto, by the preset ``fast`` on H100s with a
library's symmetric kernel, and Megatron's Muon with torch's products. Behind a time is
the busiest rank's Newton-Schulz.
"""

from __future__ import annotations

import argparse

from figures.priced_models import CASES as MODELS
from figures.priced_models import Case
from figures.stages import stage_of
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.presets import hardware_of
from megatron_muon.lab.pricing.step import price_step
from megatron_muon.lab.pricing.upstream import TpMode, price_layer_wise
from support.virtual_gpu.plans import LLAMA_8B, LLAMA_70B, LLAMA_405B, PP, TP

ASKED = ("off", "2", "4", "8", "auto")
LARGE = (
    Case("Llama-3-8B TP1 × DP64", LLAMA_8B + "--world-size 64"),
    Case("Llama-3-8B TP1 × DP512", LLAMA_8B + "--world-size 512"),
    Case("Llama-3-70B TP8 PP4 DP64", LLAMA_70B + f"{TP} 8 {PP} 4 --world-size 2048", 1),
    Case(
        "Llama-3-405B TP8 PP14 DP128",
        LLAMA_405B + f"{TP} 8 {PP} 14 --world-size 14336",
        1,
    ),
)


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--hardware", default="h100")
    given = parser.parse_args()
    hardware = hardware_of(given.hardware, [])
    heads = " | ".join(ASKED)
    print(f"| ms | {heads} | upstream blockwise / duplicated / distributed |")
    print("|---" + "|--:" * (len(ASKED) + 1) + "|")
    for case in (*MODELS, *LARGE):
        if not given.words or any(word in case.name for word in given.words):
            print(f"| {' | '.join([case.name, *_cells(case, hardware)])} |", flush=True)


def _cells(case: Case, hardware: Hardware) -> list[str]:
    cells = []
    for asked in ASKED:
        words = f"{case.words} --muon-preset fast --muon-split-matrices {asked}"
        config, optimizers = stage_of(words, "cuda_symmetric")
        step = price_step(optimizers, config, hardware, device="cuda_symmetric")
        cells.append(
            f"{1e3 * step.seconds:.1f} ({1e3 * step.newton_schulz_busiest:.1f})"
        )
    config, whole = stage_of(
        f"{case.words} --muon-preset fast --muon-split-matrices off"
    )
    modes: tuple[TpMode, ...] = "blockwise", "duplicated", "distributed"
    times = (
        price_layer_wise(whole, config, hardware, mode)[0].seconds for mode in modes
    )
    return [*cells, " / ".join(f"{1e3 * time:.1f}" for time in times)]


if __name__ == "__main__":
    main()
