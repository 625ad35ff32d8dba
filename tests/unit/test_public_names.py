"""What a user catches and calls is public, and named where usage.md says what is
stable.
"""

from __future__ import annotations

import pytest

import megatron_muon
from megatron_muon import cpu
from megatron_muon.megatron_lm import launch
from megatron_muon.runtime.patches import MissingTargetError
from support import ROOT
from support.processes import printed

# The errors with the class of Python's that they have been before they had a common
# base.
ERRORS = {
    "CoreNotFoundError": ModuleNotFoundError,
    "DigestError": ValueError,
    "KernelError": RuntimeError,
    "PhaseError": RuntimeError,
    "PlanMismatchError": RuntimeError,
    "SeamError": RuntimeError,
}
OTHERS = {
    MissingTargetError: RuntimeError,
    launch.LostGpuError: RuntimeError,
    launch.MissingPackageError: ModuleNotFoundError,
    launch.MixedInstallationError: RuntimeError,
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_public_and_has_both_its_bases(name: str) -> None:
    error = getattr(megatron_muon, name)
    assert name in megatron_muon.__all__ and error.__name__ == name
    raised = error("why")
    assert isinstance(raised, megatron_muon.MuonError)
    assert isinstance(raised, ERRORS[name]) and str(raised) == "why"


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: error.__name__)
def test_an_error_that_only_ends_a_run_has_both_bases_too(
    error: type[Exception],
) -> None:
    assert issubclass(error, megatron_muon.MuonError)
    assert issubclass(error, OTHERS[error])


def test_a_missing_module_is_still_named() -> None:
    error = megatron_muon.CoreNotFoundError("there is none", name="megatron.core")
    assert error.name == "megatron.core"


def test_every_public_name_is_there() -> None:
    for module in (megatron_muon, cpu):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_naming_an_error_imports_no_megatron_and_most_name_no_torch() -> None:
    """``except megatron_muon.SeamError`` may stand before anything else is imported."""
    code = (
        "import sys, megatron_muon as m; m.MuonError, m.SeamError, "
        "m.CoreNotFoundError, m.DigestError; print('torch' in sys.modules); "
        "m.KernelError, m.PhaseError, m.PlanMismatchError; print('megatron' in "
        "sys.modules)"
    )
    assert printed("-c", code).split() == ["False", "False"]


def test_usage_names_what_is_stable() -> None:
    usage = (ROOT / "docs" / "usage.md").read_text()
    stable = usage.partition("## What is stable")[2]
    names = ["MuonError", *ERRORS, *cpu.__all__, "optimizer.wait_for_params()"]
    assert [name for name in names if f"`{name}`" not in stable] == []
    for name, base in ERRORS.items():
        assert f"| `{name}` | `{base.__name__}` |" in stable
    others = set(megatron_muon.__all__) - {*ERRORS, "MuonError", "cpu", "__version__"}
    assert [name for name in others if f"megatron_muon.{name}" not in usage] == []
