"""What runs in one step is few modules, which a reader finds in the documents."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from megatron_muon import MuonConfig
from support import ROOT
from support.virtual_gpu.runs import Run, record_megatron

MOST_MODULES = 30
PACKAGE = ROOT / "megatron_muon"
PAGE = ROOT / "docs" / "internals.md"
HEADING = "## The modules of a step"
# Steps of both iterations and presets, of whole and shared matrices, of experts, with
# kernels and with lists.
RUNS = (
    (Run(dp=4, ep=2, experts=4), MuonConfig(round_bytes=30_000, ns_iteration="gram")),
    (
        Run(tp=2, dp=2),
        MuonConfig(preset="fast", split_matrices=2, elementwise="foreach"),
    ),
)
# Sources that a GPU compiles; the virtual one does not launch them.
KERNELS = {"rules/fused_kernels.py"}
# Of the virtual GPU: an Adam in place of Transformer Engine's, and what it puts into
# torch.
STAND_INS = {"cpu/fused_adam.py", "runtime/patches.py"}


def listed() -> list[str]:
    """The modules that the documents list, in reading order."""
    section = PAGE.read_text().split(f"{HEADING}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE)


def that_run() -> set[str]:
    """The modules whose functions are called in a step, on rank 0 of each of
    ``RUNS``.
    """
    from megatron_muon.mcore.wiring.chained_optimizer import MuonChainedOptimizer

    called: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            called.add(path.relative_to(PACKAGE).as_posix())

    original = MuonChainedOptimizer.step

    def step(optimizer: Any) -> Any:
        sys.setprofile(note)
        try:
            return original(optimizer)
        finally:
            sys.setprofile(None)

    with mock.patch.object(MuonChainedOptimizer, "step", step):
        for run, config in RUNS:
            record_megatron(run, 0, config)
    return called - STAND_INS | KERNELS


def test_the_documents_list_the_modules_of_a_step() -> None:
    assert set(listed()) == that_run()
    assert len(listed()) == len(set(listed())) <= MOST_MODULES
