"""Text and JSON of ``megatron-muon bench price``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from megatron_muon.bench.price.stages import OurStep, PricedStage
from megatron_muon.pricing import upstream
from megatron_muon.pricing.hardware import CONSTANTS, Hardware
from megatron_muon.pricing.step import PHASES

_HEADER = (
    *("optimizer step", "ms", "rounds", "launches", "host ms", "NS mean", "NS busiest"),
    *("exposed mean", "exposed most"),
)
# The time model's assumptions in addition to the constants.
ASSUMPTIONS = (
    "not counted: gradient reduction, norm and clipping, all-gather of parameters, the copy to "
    "16-bit weights; AdamW and Muon have them alike",
    "all ranks begin the step at the same moment",
    "the compute and the communication stream do not slow each other down",
    "a rank waits only for ranks that it shares bytes with; a message has its share of both links",
    "kernels of momentum and update read and write memory, whatever the L2 cache holds: fused ones "
    "14 and 10 bytes per element, with --muon-elementwise foreach 50 and 34 (pricing/step.py); "
    "AdamW's 28",
    "a library's kernel for symmetric products also adds the linear term; torch's addmm copies it "
    "first",
    "compute time of a rank does not vary from step to step",
    "Megatron's own Muon: its gradients' reduction and its launches' Python are not counted, and "
    "its owners are balanced by priced time",
)


def as_text(stages: Sequence[PricedStage], hardware: Hardware, notes: Sequence[str]) -> str:
    """A table for each stage, then every assumption."""
    lines = [f"hardware: {hardware.name}", ""]
    for stage in stages:
        lines += [f"pipeline stage {stage.number}, {stage.ranks} rank(s)", *_table(stage), ""]
    if len(stages) > 1:
        lines += _slowest(stages)
    lines.append("assumptions, each with its source; --set NAME=VALUE changes one:")
    lines += [f"  {line}" for line in hardware.lines()]
    lines += [f"  {line}" for line in (*ASSUMPTIONS, *notes)]
    lines.append("rules of Megatron's own Muon:")
    rules = (upstream.__doc__ or "").split("\n\n")[1:3]
    lines += [f"  {line}" for rule in rules for line in rule.split("\n")]
    return "\n".join(lines)


def as_json(stages: Sequence[PricedStage], hardware: Hardware, notes: Sequence[str]) -> str:
    """All figures, constants and assumptions; times in seconds."""
    sources = dict(hardware.sources)
    constants = {
        name: {
            "value": getattr(hardware, name),
            "unit": constant.metadata["unit"],
            "source": sources.get(name),
        }
        for name, constant in CONSTANTS.items()
    }
    priced: dict[str, Any] = {
        "hardware": {"name": hardware.name, "constants": constants},
        "assumptions": [*ASSUMPTIONS, *notes],
        "stages": [dataclasses.asdict(stage) for stage in stages],
    }
    return json.dumps(priced, indent=1)


def _table(stage: PricedStage) -> list[str]:
    rows = [_HEADER, ("AdamW", _ms(stage.adamw))]
    for ours in stage.ours:
        step = ours.step
        rows.append(
            (
                _name(ours),
                _ms(step.seconds),
                "+".join(map(str, step.rounds)),
                f"{step.launches:,}",
                _ms(step.host),
                *(_ms(step.newton_schulz_mean), _ms(step.newton_schulz_busiest)),
                *(_ms(step.exposed_mean), _ms(step.exposed_most)),
            )
        )
    rows.append(("Megatron's Muon, duplicated", _ms(stage.duplicated)))
    if stage.distributed != stage.duplicated:
        rows.append(("Megatron's Muon, distributed", _ms(stage.distributed)))
    full = [row + ("",) * (len(_HEADER) - len(row)) for row in rows]
    return [*_aligned(full), *_phases(stage)]


def _phases(stage: PricedStage) -> list[str]:
    """Phases of each step, in ms on the rank where the phase takes longest."""
    lines = []
    for ours in stage.ours:
        parts = [f"{name} {_ms(ours.step.phases[name])}" for name in PHASES]
        lines.append(f"  {_name(ours)}, most of a rank, ms: {', '.join(parts)}")
    return lines


def _slowest(stages: Sequence[PricedStage]) -> list[str]:
    lines = [f"slowest stage: AdamW {_ms(max(stage.adamw for stage in stages))} ms"]
    for at, ours in enumerate(stages[0].ours):
        slowest = max(stage.ours[at].step.seconds for stage in stages)
        lines.append(f"slowest stage: {_name(ours)} {_ms(slowest)} ms")
    return [*lines, ""]


def _name(ours: OurStep) -> str:
    products = "symmetric kernel" if ours.kernel else "torch's products"
    return f"ours, {ours.iteration}, {products}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return [
        "  ".join(
            f"{cell:{width}}" if at == 0 else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
