"""The time model beside figures that others measured: ``cd tests && python -m figures.back_tests``.

NVIDIA's report (blog of 2026-04-22, Megatron-Bridge 26.02, GB300, MXFP8) gives, per GPU, model
TFLOP/s with AdamW, with Muon, and Newton-Schulz TFLOP/s. The plan counts Newton-Schulz flops of a
step, so the step's time follows, and what Muon added to it. Predicted is Megatron's own Muon, less
AdamW; the last columns are the same for ours, contiguous, with torch's products. How ranks were
divided is not in the report and is assumed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from figures.planned_models import OVERLAP, planned

_TERA = 1e12


@dataclass(frozen=True, slots=True)
class Report:
    """Measured TFLOP/s per GPU."""

    name: str  # of the run
    words: str  # its flags, with an assumed division of ranks
    adamw: float  # of the model, with each optimizer
    muon: float
    newton_schulz: float  # over the whole step


REPORTS = (
    Report("Qwen3-30B-A3B, 8 GB300", "--model qwen3-30b-a3b --ep 8 --world-size 8", 713, 686, 35),
    Report(
        "Kimi K2, 256 GB300",
        "--model kimi-k2 --pp 4 --decoder-last-pipeline-num-layers 13 --ep 64 --world-size 256",
        1051,
        1029,
        51,
    ),
)


def main() -> None:
    """Print a row for each report."""
    print(
        "| run | Tflop a GPU | step measured, ms | Muon adds, ms | predicted, ms | error | "
        "ours, ms | of the step |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for report in REPORTS:
        plan = planned(f"{report.words} {OVERLAP} --hardware gb300".split())
        stages = [kind for kind in plan.kinds for _ in kind.stages]
        flops = sum(kind.row("duplicated").flops.mean for kind in stages) / len(stages)
        step = flops / (report.newton_schulz * _TERA)
        added = step * (1 - report.muon / report.adamw)
        predicted = plan.seconds("duplicated") - plan.seconds("adamw")
        ours = plan.seconds("contiguous") - plan.seconds("adamw")
        print(
            f"| {report.name} | {flops / _TERA:.1f} | {1e3 * step:,.0f} | {1e3 * added:.1f} | "
            f"{1e3 * predicted:.1f} | {predicted / added - 1:+.0%} | "
            f"{1e3 * ours:.1f} | {ours / (step - added):.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
