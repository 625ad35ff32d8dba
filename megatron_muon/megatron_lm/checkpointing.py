"""Additions to Megatron-LM's saving and loading where the run is Muon's."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
from collections.abc import Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron_muon.mcore.checkpoint.manifest import iteration_of, last_complete
from megatron_muon.megatron_lm import switching, tracker
from megatron_muon.megatron_lm.flags.namespace import is_on, parsed
from megatron_muon.runtime.consensus import by_rank_0
from megatron_muon.runtime.patches import Function

# The optimizer's name in a checkpoint's arguments. The saver of tools/checkpoint hands
# them to validate_args of a Megatron without the plugin. In 0.16 and 0.17 it refuses a
# name with "muon" in it together with use_distributed_optimizer.
SAVED_NAME = "Muon"


def generate_state_dict(
    original: Function, args: Any, *rest: Any, **kwargs: Any
) -> Any:
    """Megatron's state dict, with arguments that its tools can read without the
    plugin.
    """
    state_dict = original(args, *rest, **kwargs)
    if is_on(args) and state_dict.get("args") is args:
        state_dict["args"] = copy.copy(args)
        state_dict["args"].optimizer = SAVED_NAME
    return state_dict


# --- saving ---------------------------------------------------------------------------


def save_checkpoint(
    original: Function, iteration: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Megatron's save. With ``--ckpt-format torch`` it ends with a manifest.

    For other formats ``mcore.checkpoint.seal`` writes it before Megatron writes its
    tracker.
    """
    flags = parsed()
    call = inspect.signature(original).bind(iteration, model, *args, **kwargs)
    asked = call.arguments
    write = partial(original, *call.args, **call.kwargs)
    is_torch = not (flags.use_dist_ckpt or asked.get("non_persistent_ckpt"))
    if not (is_on(flags) and is_torch) or "://" in flags.save:
        return write()
    from megatron_muon.mcore.checkpoint.seal import sealed

    folder = _checkpointing().get_checkpoint_name(
        flags.save,
        iteration,
        release=asked.get("release", False),
        return_base_dir=True,
    )
    return sealed(write, str(folder), getattr(asked["optimizer"], "record", None))


# --- loading --------------------------------------------------------------------------


def load_checkpoint(
    original: Function,
    ddp_model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's load, after a check of the checkpoint.

    With ``--override-opt_param-scheduler`` the rates are those of this run. AdamW's own
    loads are Megatron's; a line says where the rates are not this run's.
    """
    flags = parsed()
    is_muon = is_on(flags)
    override = flags.override_opt_param_scheduler
    load_dir = getattr(flags, kwargs.get("load_arg", args[0] if args else "load"))
    loads = partial(
        _load, original, ddp_model, optimizer, opt_param_scheduler, *args, **kwargs
    )
    if not is_muon and not getattr(flags, "adamw_from_muon", False):
        watch: AbstractContextManager[None] = nullcontext()
        if override and optimizer is not None:
            from megatron_muon.megatron_lm.rates import watching_adamw

            watch = watching_adamw(optimizer)
        with _explained_to_others(load_dir, flags), watch:
            return loads()
    from megatron_muon.mcore.checkpoint.seal import forget_check
    from megatron_muon.megatron_lm.loaded import say_loaded
    from megatron_muon.megatron_lm.rates import of_this_run

    # as Megatron does within its load
    flags.finetune |= by_rank_0(lambda: _is_from_pretrained(flags, load_dir))
    # ranks may see different files
    found = by_rank_0(lambda: str(newest(flags, load_dir) or ""))
    folder = Path(found) if found else None
    is_checked = _is_checked(flags, folder, optimizer, is_muon)
    with (
        switching.from_other(flags, optimizer, folder, muon=is_muon) as how,
        tracker.naming(_checkpointing(), load_dir, _step(flags)),
        of_this_run(optimizer, opt_param_scheduler, override=override),
    ):
        try:
            result = loads()
        finally:
            forget_check()
    is_own = is_muon and how == "unconverted"
    if is_own and folder and iteration_of(folder.name) is not None:
        say_loaded(optimizer, folder, is_checked=is_checked)
    return result


_OTHER_SIZES = ": not supported for DistributedOptimizer with sharding type"


def _load(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Megatron's load. Its error about another TP or PP names a flag that its save has
    by default; ours names the one that helps. That about another DP names a key.
    """
    from megatron_muon.mcore.checkpoint.absent import explained

    try:
        with explained("the checkpoint", is_muons=False):
            return original(*args, **kwargs)
    except RuntimeError as error:
        sizes, is_about_sizes, _ = str(error).partition(_OTHER_SIZES)
        if not is_about_sizes:
            raise
    from megatron_muon.mcore.seams.rows import megatron_version

    save = "without --no-ckpt-fully-parallel-save"
    if megatron_version()[1] >= (0, 15):
        save = "with --dist-ckpt-optim-fully-reshardable"
    raise ValueError(
        f"{sizes}: this checkpoint's optimizer state loads at the saved TP and PP "
        f"only. Resume there and save once {save}; that checkpoint loads at any TP and "
        "PP. Or load the model alone (--no-load-optim)"
    )


@contextmanager
def _explained_to_others(load_dir: str | None, flags: Any) -> Iterator[None]:
    """Explain another optimizer's failed load of Muon's checkpoint; until then do
    nothing.
    """
    try:
        yield
    except (Exception, CheckpointException):  # torch's is no Exception
        from megatron_muon.mcore.checkpoint.interop.saved import Saved

        is_muons = False
        with suppress(Exception):  # then Megatron's own error is raised
            folder = _latest(str(load_dir), _step(flags))
            is_muons = folder is not None and Saved.of(folder).writer == "muon"
        if not is_muons:
            raise
        way = (
            "give --adamw-from-muon (Adam's moments of what Muon had start at "
            "zero), or "
        )
        if flags.optimizer != "adam":
            way = f"--optimizer {flags.optimizer} of Megatron's own cannot read it: "
        raise ValueError(
            f"{folder} has Muon's optimizer state: {way}load the model alone "
            "(--no-load-optim)"
        ) from None  # the keys that are missing fill pages on every rank


def _is_checked(flags: Any, folder: Path | None, optimizer: Any, is_muon: bool) -> bool:
    """Check the checkpoint in ``folder``, if there is one, before a run that may read
    Muon's state reads it; whether its files were compared with a manifest.
    """
    if folder is None or getattr(flags, "no_muon_checkpoint_digest", False):
        return False
    from megatron_muon.mcore.checkpoint.seal import check

    loads_state = is_muon and not (flags.finetune or flags.no_load_optim)
    return check(
        str(folder), getattr(optimizer, "record", None) if loads_state else None
    )


def newest(flags: Any, load_dir: str | None) -> Path | None:
    """The folder that Megatron will read, as this rank sees it; None for none or a
    local one.
    """
    if _is_from_pretrained(flags, load_dir):
        load_dir = flags.pretrained_checkpoint
    persistent = _latest(load_dir, _step(flags))
    kind = flags.non_persistent_ckpt_type
    where = flags.non_persistent_global_ckpt_dir
    if kind not in (None, "global"):
        return None
    if kind is None or not (where or load_dir):
        return persistent
    name = _checkpointing()._NON_PERSISTENT_CKPT_SUBDIR
    other = _latest(where or os.path.join(str(load_dir), name), None)
    if persistent is None or other is None:
        return persistent or other
    one = iteration_of(persistent.name)
    two = iteration_of(other.name)
    return other if one is not None and two is not None and one <= two else persistent


def _is_from_pretrained(flags: Any, load_dir: str | None) -> bool:
    pretrained = getattr(flags, "pretrained_checkpoint", None)
    return bool(pretrained) and not (
        load_dir and _checkpointing().checkpoint_exists(load_dir)
    )


def _step(flags: Any) -> int | None:
    """``--ckpt-step``; None where it is not given or 0, which is the same to
    Megatron.
    """
    return getattr(flags, "ckpt_step", None) or None


def _latest(load_dir: str | None, step: int | None) -> Path | None:
    """The folder of a step, or the one that the tracker names; None without one."""
    if load_dir is None or "://" in load_dir:
        return None
    name = (
        f"iter_{step:07d}"
        if step is not None
        else tracker.named_by(Path(load_dir), last_complete)
    )
    if name is None:
        return None
    release = name == "release"
    number = 0 if release else int(name.removeprefix("iter_"))
    find = _checkpointing().get_checkpoint_name
    return Path(find(load_dir, number, release=release, return_base_dir=True))


# --- both -----------------------------------------------------------------------------


def _checkpointing() -> Any:
    return importlib.import_module("megatron.training.checkpointing")
