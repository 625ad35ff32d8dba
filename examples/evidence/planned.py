"""Bytes that AdamW and Muon are planned to send and to hold, as ``megatron-muon plan``
has them.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_muon.lab.dry_run.model import Run, ranks_of
from megatron_muon.lab.plan.kinds import planned_kinds
from megatron_muon.lab.pricing.memory import MAIN, MOMENTS, MOMENTUM, at_rest
from megatron_muon.settings.config import MuonConfig


def planned(
    flags: Namespace, muon: MuonConfig, adamw: MuonConfig, device: Any
) -> dict[str, int]:
    """All pipeline stages; no process group is needed.

    Args:
        flags: of the model and its ranks.
        muon: Muon's settings.
        adamw: settings that give the layout of AdamW's buffers.
        device: kind of device of all ranks.
    """
    ranks = ranks_of(flags)
    sent: list[int] = []
    states: dict[str, list[int]] = {"adamw": [], "muon": []}
    runs = [Run(flags, muon, ranks), Run(flags, adamw, ranks)]
    for kind in planned_kinds(runs, device, range(ranks.pp)):
        own, adamws = kind.optimizers
        each = zip(*(one.plan.sent_bytes() for one in own), strict=True)
        sent += [sum(of_rank) for of_rank in each] * len(kind.stages)
        for name, optimizers in (("muon", own), ("adamw", adamws)):
            rest = at_rest(optimizers, with_muon=name == "muon")
            states[name] += [one[MAIN] + one[MOMENTS] + one[MOMENTUM] for one in rest]
    most = {f"{name}_state": max(sizes) for name, sizes in states.items()}
    return {"exchange": sum(sent), "busiest": max(sent), **most}
