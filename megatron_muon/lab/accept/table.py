"""The checks in their order."""

from __future__ import annotations

from dataclasses import dataclass

_CHECKS = "megatron_muon.lab.accept.checks"


@dataclass(frozen=True, slots=True)
class Check:
    """A check.

    Attributes:
        name: its name, as ``--only`` takes it.
        title: the question that it answers.
        run: ``module:function``; the function takes Settings and returns its parts. It is imported
            in the check's own process.
        seconds: its time limit.
        builds: whether its process imports Megatron before it starts ranks: then without a GPU.
    """

    name: str
    title: str
    run: str
    seconds: float
    builds: bool = False


CHECKS = (
    Check("doctor", "Would Muon run here?", f"{_CHECKS}.doctor:run", 90),
    Check("sanitizer", "Does a step race?", f"{_CHECKS}.sanitizer:run", 120, builds=True),
    Check("bits", "Does the device compute what a CPU does?", f"{_CHECKS}.bits:run", 120),
    Check("cost", "Does a step cost what is predicted?", f"{_CHECKS}.cost:run", 240, builds=True),
    Check("newton-schulz", "Speed and accuracy", f"{_CHECKS}.newton_schulz:run", 180),
    Check("step", "A step beside other optimizers' steps", f"{_CHECKS}.step:run", 240),
    Check("training", "Does a small GPT learn?", f"{_CHECKS}.training:run", 120, builds=True),
    Check("checkpoint", "Save, load, kill, switch", f"{_CHECKS}.checkpoint:run", 300),
)
