"""Save a run at one topology and resume it at another; the functions run on
ranks.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from support.checkpoints.saving import (
    RESHARDABLE,
    load,
    load_parameter_state,
    save,
    spoil,
)
from support.installed import installed
from support.models.gpt import (
    Built,
    held,
    on_ranks,
    start,
    stepped,
    take_step,
    take_steps,
)
from support.ranks import error_of
from support.runs.cases import Case, Topology
from support.runs.whole import Whole, differences, of_optimizer, whole

Held = dict[str, Any]


def _held(built: Built) -> Held:
    """What ``gpt.held`` says, with the AdamW steps and the loss scales of all
    groups.
    """
    scalers = [part.grad_scaler.state_dict() for part in built.parts if built.case.fp16]
    # fused Adams leave the step of a group without parameters here behind
    groups = [group for group in built.param_groups if group["params"]]
    steps = sorted({int(group["step"]) for group in groups if "step" in group})
    return {**held(built), "steps": steps, "scalers": scalers}


def saved(
    case: Case,
    topology: Topology,
    format: str,
    folder: Path,
    parallel: bool = False,
    asynchronous: bool = False,
) -> tuple[Held, Held]:
    """What this rank holds after half of the case's steps, when it saves, and after
    all.

    With ``asynchronous`` the other half is taken while the files are written.
    """
    half = case.steps // 2
    built = stepped(case, topology, half)
    before = _held(built)
    go_on = partial(take_steps, built, range(half, case.steps))
    if asynchronous:
        save(built, folder, format, parallel, go_on)
    else:
        save(built, folder, format, parallel)
        go_on()
    return before, _held(built)


def loaded(
    case: Case,
    topology: Topology,
    format: str,
    folder: Path,
    parallel: bool = False,
    dirty: bool = False,
) -> tuple[Held, Held]:
    """What this rank holds after loading into a new run, and after the other half of
    the steps. With ``dirty`` it has taken a step before the load, so that its state is
    made and wrong.
    """
    built = start(case, topology)
    if dirty:
        take_step(built, case.steps + 1)
    spoil(built)
    built.log.clear()
    load(built, folder, format, parallel)
    before = _held(built)
    take_steps(built, range(case.steps // 2, case.steps))
    return before, _held(built)


def resharded(
    at_save: Case,
    before: Topology,
    at_load: Case,
    after: Topology,
    folder: Path,
) -> tuple[list[Whole], list[Whole]]:
    """What the run that saves has at the save and after all steps, and what another
    has at the load and after all steps. From the test's process.
    """
    runs = (
        on_ranks(saved, at_save, before, RESHARDABLE, folder),
        on_ranks(loaded, at_load, after, RESHARDABLE, folder),
    )
    one, other = ([whole(when) for when in zip(*held, strict=True)] for held in runs)
    return one, other


def check_resharded(
    at_save: Case,
    before: Topology,
    at_load: Case,
    after: Topology,
    folder: Path,
) -> None:
    """Both have the same state at the load and after all steps, which change it."""
    runs = resharded(at_save, before, at_load, after, folder)
    (at_once, later), (loaded, others_later) = (
        map(of_optimizer, held) for held in runs
    )
    assert differences(at_once, loaded) == differences(later, others_later) == []
    assert differences(loaded, later)


def refused(case: Case, topology: Topology, format: str, folder: Path) -> str:
    """What loading into a new run raises with the plugin installed; in the format
    ``torch`` only what the optimizer itself reads is.
    """
    built = start(case, topology)
    take_step(built, 0)
    read = load_parameter_state if format == "torch" else load
    with installed():
        return error_of(lambda: read(built, folder, format))
