"""Steps with long matrices on one home each, and on several: their predicted times.

``cd tests && python -m figures.scale.shared_steps [WORD ...]``

Prices stages of ``figures.priced_models`` and larger ones with ``--muon-split-matrices`` off, 2, 4,
8 and auto, by the preset ``fast`` on H100s with a library's symmetric kernel. Behind a time is the
busiest rank's Newton-Schulz. The last columns are flops of the busiest rank over the mean: without
shared matrices; with auto, over that mean and over auto's own, in which squares count at every
home. Then come the bytes that all ranks send beside those without shared matrices, all and between
nodes, and between nodes those of the rank that sends most; the ranks of a stage follow each other
from a node's first GPU on.
"""

from __future__ import annotations

import argparse

from figures.priced_models import CASES as MODELS
from figures.priced_models import Case
from figures.stages import stage_of
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.presets import hardware_of
from megatron_muon.lab.pricing.step import price_step
from megatron_muon.lab.pricing.streams import nodes_of
from megatron_muon.lab.pricing.upstream import TpMode, price_layer_wise
from megatron_muon.lab.pricing.work import total, traffic_of
from megatron_muon.planning.plan import ExchangePlan
from support.virtual_gpu.plans import LLAMA_8B, LLAMA_70B, LLAMA_405B, PP, TP

ASKED = ("off", "2", "4", "8", "auto")
LARGE = (
    Case("Llama-3-8B TP1 × DP64", LLAMA_8B + "--world-size 64"),
    Case("Llama-3-8B TP1 × DP512", LLAMA_8B + "--world-size 512"),
    Case("Llama-3-70B TP8 PP4 DP64", LLAMA_70B + f"{TP} 8 {PP} 4 --world-size 2048", 1),
    Case("Llama-3-405B TP8 PP14 DP128", LLAMA_405B + f"{TP} 8 {PP} 14 --world-size 14336", 1),
)


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--hardware", default="h100")
    given = parser.parse_args()
    hardware = hardware_of(given.hardware, [])
    heads = " | ".join(ASKED)
    ratios = "busiest / mean, off | auto | auto / its mean | bytes, auto / off"
    upstream = "upstream blockwise / duplicated / distributed"
    print(f"| ms | {heads} | {upstream} | {ratios} | between nodes | there at most |")
    print("|---" + "|--:" * (len(ASKED) + 7) + "|")
    for case in (*MODELS, *LARGE):
        if not given.words or any(word in case.name for word in given.words):
            print(f"| {' | '.join([case.name, *_cells(case, hardware)])} |", flush=True)


def _cells(case: Case, hardware: Hardware) -> list[str]:
    cells = []
    plans = {}
    for asked in ASKED:
        words = f"{case.words} --muon-preset fast --muon-split-matrices {asked}"
        config, optimizers = stage_of(words, "cuda_symmetric")
        plans[asked] = [one.plan for one in optimizers]
        step = price_step(optimizers, config, hardware, device="cuda_symmetric")
        cells.append(f"{1e3 * step.seconds:.1f} ({1e3 * step.newton_schulz_busiest:.1f})")
        if asked == "off":
            whole = stage_of(words)[1]
            modes: tuple[TpMode, ...] = "blockwise", "duplicated", "distributed"
            times = (price_layer_wise(whole, config, hardware, mode)[0].seconds for mode in modes)
            upstream = " / ".join(f"{1e3 * time:.1f}" for time in times)
    off, auto = (total([plan.ns_flops() for plan in plans[asked]]) for asked in ("off", "auto"))
    mean, own_mean = sum(off) / len(off), sum(auto) / len(auto)
    cells += [upstream, f"{max(off) / mean:.2f}", f"{max(auto) / mean:.2f}"]
    cells.append(f"{max(auto) / own_mean:.2f}")
    sent = zip(*(_bytes(plans[asked], hardware) for asked in ("auto", "off")), strict=True)
    return cells + [f"{after / before:.2f}" if before else "–" for after, before in sent]


def _bytes(plans: list[ExchangePlan], hardware: Hardware) -> tuple[int, int, int]:
    """Bytes that ranks send: all, between nodes, and there the most of one."""
    traffic = traffic_of(plans, nodes_of(range(plans[0].size), hardware))
    return sum(traffic.sent), sum(traffic.between), max(traffic.between)


if __name__ == "__main__":
    main()
