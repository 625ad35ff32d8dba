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

RUN = "Qwen3-30B-A3B, 8 GB300"
WORDS = "--model qwen3-30b-a3b --ep 8 --world-size 8"  # an assumed division of ranks
ADAMW, MUON, NEWTON_SCHULZ = 713, 686, 35  # TFLOP/s


def main() -> None:
    """Print the report's row."""
    print("| run | Muon adds, ms | predicted, ms | error |\n|---|--:|--:|--:|")
    plan = planned(f"{WORDS} {OVERLAP} --hardware gb300".split())
    stages = [kind for kind in plan.kinds for _ in kind.stages]
    flops = sum(kind.row("duplicated").flops.mean for kind in stages) / len(stages)
    added = flops / (NEWTON_SCHULZ * 1e12) * (1 - MUON / ADAMW)
    predicted = plan.seconds("duplicated") - plan.seconds("adamw")
    times = f"{1e3 * added:.1f} | {1e3 * predicted:.1f}"
    print(f"| {RUN} | {times} | {predicted / added - 1:+.0%} |")


if __name__ == "__main__":
    main()
