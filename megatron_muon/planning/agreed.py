"""The inputs of a plan, as lines that the ranks of a stage compare before they make the
plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.layout import Parameter
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.settings.config import MuonConfig
from megatron_muon.version import __version__


def description(
    parameters: Sequence[Parameter],
    numerics: Numerics,
    earlier: Sequence[ExchangePlan] = (),
    later: int = 0,
) -> list[str]:
    """All inputs of a plan but the grid, one per line.

    A line is a name and a value, ``setting momentum: 0.95``, so an error names the line
    that differs. The kind of device has a line only where costs depend on it: with the
    standard iteration and plain products, kinds may differ. Of ``earlier`` plans, whose
    homes this plan's depend on, there is a fingerprint; of the work that comes
    ``later``, its flops.
    """
    devices = (
        [f"kind of device: {numerics.device}"] if numerics.costs_follow_device else []
    )
    homes = [
        [f"{matrix.name} {matrix.home}" for matrix in plan.matrices] for plan in earlier
    ]
    hashes = [fingerprint(each).hex()[:16] for each in homes]
    before = [f"homes of optimizer {at}: {each}" for at, each in enumerate(hashes)]
    after = [f"flops of later optimizers: {later}"] if later else []
    return [
        *settings(numerics.config),
        *devices,
        *before,
        *after,
        *map(_describe, parameters),
    ]


def settings(config: MuonConfig) -> list[str]:
    """All settings, one per line."""
    return [f"setting {f.name}: {getattr(config, f.name)!r}" for f in fields(config)]


def of_run(config: MuonConfig, optimizer: str, core: str) -> list[str]:
    """What all ranks of a run must have, one per line; Megatron's optimizer, and its
    version.
    """
    return [
        f"version of megatron-muon: {__version__}",
        f"version of megatron-core: {core}",
        f"optimizer: {optimizer!r}",
        *settings(config),
    ]


def _describe(parameter: Parameter) -> str:
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
