"""What splits of weights cost at real sizes: ``cd tests && python -m figures.split_costs``.

For each model and each choice of matrices: matrices, Newton-Schulz flops and bytes sent of one step
of one pipeline stage, from the run's own plan, and its optimizer step as ``megatron-muon plan`` has
it on an H100 without a library's symmetric kernel.
"""

from __future__ import annotations

import contextlib
import sys
import warnings

from figures.priced_models import CASES
from figures.priced_stages import priced_of
from megatron_muon.lab.pricing.presets import hardware_of
from megatron_muon.lab.routes.model_flags import import_megatron
from support.virtual_gpu.plans import OVERLAP, settled_flags

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
        "gate and up": (f"{FC1}=gate-up", "*.local_experts.*.linear_fc1.weight=gate-up"),
    },
}


def main() -> None:
    """Print a row for each choice."""
    import_megatron("figures.split_costs")  # before Megatron is imported
    from megatron_muon.lab.dry_run.model import ranks_of
    from megatron_muon.lab.dry_run.stages import planned_stage
    from megatron_muon.megatron_lm.flags.settings import muon_config

    hardware = hardware_of("h100", [])
    print("| model | matrices | number | Tflop a step | GB sent, mean rank | step, ms |")
    print("|---|---|--:|--:|--:|--:|")
    for case in CASES:
        for name, patterns in CHOICES.get(case.name, {}).items():
            split = [word for pattern in patterns for word in ("--muon-split", pattern)]
            words = [*f"{case.words} {OVERLAP}".split(), *split]
            with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (stage,), _ = priced_of([*words, "--stage", str(case.stage)], hardware, {})
                flags = settled_flags(words)[0]
                of_stage = planned_stage(flags, muon_config(flags), ranks_of(flags), case.stage)
            plans = [each.plan for each in of_stage]
            flops = sum(sum(plan.ns_flops()) for plan in plans)
            sent = sum(sum(plan.sent_bytes()) / plan.size for plan in plans)
            matrices = sum(len(plan.matrices) for plan in plans)
            cells = f"{matrices:,} | {flops / 1e12:.1f} | {sent / 1e9:.2f}"
            print(f"| {case.name} | {name} | {cells} | {1e3 * stage.ours[-2].step.seconds:.1f} |")


if __name__ == "__main__":
    main()
