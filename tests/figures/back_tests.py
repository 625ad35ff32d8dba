"""The time model beside figures that others measured: ``cd tests && python -m
figures.back_tests``.

NVIDIA's report (blog of 2026-04-22, Megatron-Bridge 26.02, GB300, MXFP8) gives, per
GPU, model TFLOP/s with AdamW, with Muon, and Newton-Schulz TFLOP/s. The plan counts
Newton-Schulz flops of a step, so the step's time follows, and what Muon added to it.
Predicted is Megatron's own Muon, less AdamW. How ranks were divided is not in the
report and is assumed here. Its Kimi K2 on 256 GPUs is left out: what Muon adds there
asks for nearly a GB300's peak, which no model of products meets.
"""

from __future__ import annotations

from figures.planned_models import OVERLAP, planned

# flags, with an assumed division of ranks; TFLOP/s with AdamW, Muon, of Newton-Schulz
REPORTS = {
    "Qwen3-30B-A3B, 8 GB300": (
        "--model qwen3-30b-a3b --ep 8 --world-size 8",
        713,
        686,
        35,
    ),
}


def main() -> None:
    """Print a row for each report."""
    print("| run | Muon adds, ms | predicted, ms | error |\n|---|--:|--:|--:|")
    for name, (words, adamw, muon, newton_schulz) in REPORTS.items():
        plan = planned(f"{words} {OVERLAP} --hardware gb300".split())
        stages = [kind for kind in plan.kinds for _ in kind.stages]
        flops = sum(kind.row("duplicated").flops.mean for kind in stages) / len(stages)
        added = flops / (newton_schulz * 1e12) * (1 - muon / adamw)
        predicted = plan.seconds("duplicated") - plan.seconds("adamw")
        times = f"{1e3 * added:.1f} | {1e3 * predicted:.1f}"
        print(f"| {name} | {times} | {predicted / added - 1:+.0%} |", flush=True)


if __name__ == "__main__":
    main()
