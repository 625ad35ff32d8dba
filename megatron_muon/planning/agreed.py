"""What ranks compare before the first step, as lines.

A line is a name and a value, ``setting momentum: 0.95``, so an error names the line
that differs. All inputs of a stage's plans are among them, and the plans follow from
these alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.layout import Parameter
from megatron_muon.settings.config import MuonConfig
from megatron_muon.version import __version__


def run_lines(config: MuonConfig, optimizer: str, core: str) -> list[str]:
    """Versions and settings, of a run whose Megatron has this version and optimizer."""
    settings = [
        f"setting {f.name}: {getattr(config, f.name)!r}" for f in fields(config)
    ]
    return [
        f"version of megatron-muon: {__version__}",
        f"version of megatron-core: {core}",
        f"optimizer: {optimizer!r}",
        *settings,
    ]


def device_lines(numerics: Numerics) -> list[str]:
    """The kind of device, where costs depend on it: with the standard iteration and
    plain products, kinds may differ.
    """
    if not numerics.costs_follow_device:
        return []
    return [f"kind of device: {numerics.device}"]


def parameter_line(parameter: Parameter) -> str:
    """A parameter of a stage: its shape, place and matrices."""
    matrices = ", ".join(
        f"{m.name} {m.units}x{m.rows}x{m.cols}" for m in parameter.matrices
    )
    place = (
        f"buffer {parameter.buffer}, bucket {parameter.bucket}, elements "
        f"{parameter.span}"
    )
    return (
        f"{parameter.name}: local shape {parameter.shape}, partition_dim "
        f"{parameter.partition_dim},"
        f" {place}, matrices {matrices}, rows "
        f"{fingerprint([repr(parameter.blocks)]).hex()[:16]}"
    )


def fingerprint(lines: Sequence[str]) -> bytes:
    """32 bytes that differ where ``lines`` do."""
    return hashlib.sha256("\n".join(lines).encode()).digest()
