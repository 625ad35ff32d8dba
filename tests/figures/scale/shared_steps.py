"""Steps with long matrices on one home each, and on several: their predicted times.

``cd tests && python -m figures.scale.shared_steps [WORD ...]``

Prices stages of ``figures.priced_models`` and larger ones with
``--muon-split-matrices`` off, 2, 4, 8 and auto, by the preset ``fast`` on H100s with a
library's symmetric kernel, and Megatron's Muon with torch's products. Behind a time is
the busiest rank's Newton-Schulz.
"""

from __future__ import annotations

from collections.abc import Iterator

from figures.priced_models import CASES as MODELS
from figures.priced_models import Case, chosen
from figures.stages import stage_of, step_of
from megatron_muon.lab.pricing.presets import H100
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
    heads = " | ".join(ASKED)
    print(f"| ms | {heads} | upstream blockwise / duplicated / distributed |")
    print("|---" + "|--:" * (len(ASKED) + 1) + "|")
    for case in chosen((*MODELS, *LARGE)):
        print(f"| {' | '.join([case.name, *_cells(case)])} |", flush=True)


def _cells(case: Case) -> Iterator[str]:
    words = f"{case.words} --muon-preset fast --muon-split-matrices"
    for asked in ASKED:
        step = step_of(f"{words} {asked}", "cuda_symmetric")
        yield f"{1e3 * step.seconds:.1f} ({1e3 * step.newton_schulz_busiest:.1f})"
    config, whole = stage_of(f"{words} off")
    modes: tuple[TpMode, ...] = "blockwise", "duplicated", "distributed"
    times = (price_layer_wise(whole, config, H100, mode)[0].seconds for mode in modes)
    yield " / ".join(f"{1e3 * time:.1f}" for time in times)


if __name__ == "__main__":
    main()
