"""Save a run at one topology and resume it at another; the functions run on
ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from support.checkpoints.saving import (
    load,
    load_parameter_state,
    save,
    spoil,
    unequal,
)
from support.installed import installed
from support.models.gpt import (
    Built,
    distributed_optimizers,
    held,
    start,
    take_step,
    take_steps,
)
from support.ranks import error_of
from support.runs.cases import Case, Topology

Held = dict[str, Any]


def _held(built: Built) -> Held:
    """What ``gpt.held`` says, with the AdamW steps and the loss scales of all
    groups.
    """
    parts = distributed_optimizers(built.optimizer)
    groups = [group for part in parts for group in part.optimizer.param_groups]
    scalers = [part.grad_scaler.state_dict() for part in parts if built.case.fp16]
    # fused Adams leave the step of a group without parameters here behind
    steps = sorted(
        {int(group["step"]) for group in groups if group["params"] and "step" in group}
    )
    return {**held(built), "steps": steps, "scalers": scalers}


def saved(
    case: Case,
    topology: Topology,
    format: str,
    folder: str,
    parallel: bool = False,
    asynchronous: bool = False,
) -> tuple[Held, Held]:
    """What this rank holds after half of the case's steps, when it saves, and after
    all.

    With ``asynchronous`` the other half is taken while the files are written.
    """
    half = case.steps // 2
    built = start(case, topology)
    take_steps(built, range(half))
    before = _held(built)
    go_on = partial(take_steps, built, range(half, case.steps))
    if asynchronous:
        save(built, folder, format, parallel, go_on)
    else:
        save(built, folder, format, parallel)
        before["unlike"] = unequal(before, _held(built), "by saving: ")
        go_on()
    return before, _held(built)


def loaded(
    case: Case,
    topology: Topology,
    format: str,
    folder: str,
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


def resumed(
    case: Case, topology: Topology, format: str, folder: str, dirty: bool = False
) -> dict[str, Any]:
    """``saved`` and then ``loaded`` on the same ranks: the ``differences`` of the second
    run, whether the steps after the load ``moved`` anything, and what is ``held``.
    """
    before, expected = saved(case, topology, format, folder)
    read, after = loaded(case, topology, format, folder, dirty=dirty)
    unlike = before["unlike"] + unequal(before, read, "by loading: ")
    for name, values in after["log"].items():
        wanted = expected["log"][name][case.steps // 2 :]
        if values != wanted:
            unlike.append(f"{name}: {values}, not {wanted}")
    unlike += unequal(expected, after, "after more steps: ")
    moved = bool(unequal(before, after, ""))
    return {"differences": unlike, "moved": moved, "held": after}


def refused(case: Case, topology: Topology, format: str, folder: str) -> str:
    """What loading into a new run raises with the plugin installed; in the format
    ``torch`` only what the optimizer itself reads is.
    """
    built = start(case, topology)
    take_step(built, 0)
    read = load_parameter_state if format == "torch" else load
    with installed():
        return error_of(lambda: read(built, folder, format))
