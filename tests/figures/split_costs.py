"""What splits of weights cost at real sizes: ``cd tests && python -m
figures.split_costs``.

For each model and each choice of matrices: matrices, Newton-Schulz flops and bytes sent
of one step of one pipeline stage, from the run's own plan, and its optimizer step as
``megatron-muon plan`` has it on an H100 without a library's symmetric kernel.
"""

from __future__ import annotations

from figures.priced_models import CASES
from figures.stages import stage_of
from megatron_muon.lab.pricing.presets import H100
from megatron_muon.lab.pricing.step import price_step

QKV, FC1 = "*.linear_qkv.weight", "*.linear_fc1.weight*"
UP, DOWN = "*_up_proj.weight", "*.linear_kv_down_proj.weight"
CHOICES = {
    "Llama-3-8B TP1 × DP8": {
        "q, k, v; fc1 whole (default)": (),
        "one qkv": (f"{QKV}=whole",),
        "heads": (f"{QKV}=heads",),
        "gate and up": (f"{FC1}=gate-up",),
        "heads; gate and up": (f"{QKV}=heads", f"{FC1}=gate-up"),
    },
    "DeepSeek-V3 PP16 EP64, 1,024 GPUs": {
        "whole (default)": (),
        "up-projections by head": (f"{UP}=heads",),
        "up-projections by head; latent and rope": (f"{UP}=heads", f"{DOWN}=parts"),
        "gate and up": (
            f"{FC1}=gate-up",
            "*.local_experts.*.linear_fc1.weight=gate-up",
        ),
    },
}


def main() -> None:
    """Print a row for each choice."""
    print(
        "| model | matrices | number | Tflop a step | GB sent, mean rank | step, ms |"
    )
    print("|---|---|--:|--:|--:|--:|")
    for case in CASES:
        for name, patterns in CHOICES.get(case.name, {}).items():
            split = " ".join(f"--muon-split {pattern}" for pattern in patterns)
            config, optimizers = stage_of(f"{case.words} {split}")
            plans = [one.plan for one in optimizers]
            flops = sum(sum(plan.ns_flops()) for plan in plans)
            sent = sum(sum(plan.sent_bytes()) / plan.size for plan in plans)
            matrices = sum(len(plan.matrices) for plan in plans)
            seconds = price_step(optimizers, config, H100).seconds
            cells = (
                f"{matrices:,} | {flops / 1e12:.1f} | {sent / 1e9:.2f} | "
                f"{1e3 * seconds:.1f}"
            )
            print(f"| {case.name} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
