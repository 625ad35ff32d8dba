"""The megatron-core that the tests run with: any from 0.12 on, first on PYTHONPATH."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import megatron.core

from support import te_on_cpu

if TYPE_CHECKING:
    from support.runs.cases import Case, Topology

NAME: str = megatron.core.__version__
VERSION: tuple[int, int] = tuple(int(part) for part in NAME.split(".")[:2])


def lacks(case: Case, topology: Topology) -> str | None:
    """Why this megatron-core cannot build the case; None where it can."""
    if case.grouped == "legacy" and VERSION >= (0, 17):
        return f"megatron-core {NAME} has no legacy GroupedMLP"
    if case.moe and topology.instances > 1 and VERSION < (0, 13):
        return f"megatron-core {NAME} has no experts in several optimizer instances"
    te = te_on_cpu.TE is not None
    if case.mla == "duplicated" and VERSION < (0, 13) and not te:
        return (
            f"megatron-core {NAME} builds these projections with Transformer "
            "Engine's arguments"
        )
    if case.fp8 and not te:
        return "fp8 parameters are Transformer Engine's"
    if case.mtp and VERSION >= (0, 20) and not te:
        return f"megatron-core {NAME} builds MTP with Transformer Engine only"
    if (
        (topology.tp > case.groups or case.output_gate)
        and not case.mla
        and VERSION < (0, 16)
    ):
        return (
            f"megatron-core {NAME} has no query groups on several TP ranks, and "
            "no output gate"
        )
    if case.mixer == "delta" and VERSION < (0, 16):
        return f"megatron-core {NAME} has no gated delta nets"
    if case.expert_biases and VERSION < (0, 15):
        return f"megatron-core {NAME} has no biases of experts"
    if case.sinks and VERSION < (0, 15):
        return f"megatron-core {NAME} has no learnable softmax offsets"
    whole = (topology.tp, topology.pp, topology.dp, topology.overlap) == (
        2,
        2,
        2,
        False,
    )
    if case.tied and whole and VERSION < (0, 13):
        return (
            f"megatron-core {NAME} cannot build this model's DistributedOptimizer, "
            "AdamW's too"
        )
    return None


@contextmanager
def installed(config: Any = None) -> Iterator[None]:
    """Within it the plugin is installed with these settings, or its own; then as it was
    before.
    """
    from megatron_muon.mcore.wiring.install import install, settings, uninstall

    before = settings()
    install(config)
    try:
        yield
    finally:
        uninstall() if before is None else install(before)
