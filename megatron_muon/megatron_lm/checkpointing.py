"""Additions to Megatron-LM's saving and loading where the run is Muon's."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_muon.mcore.load_check.digest import iteration_of
from megatron_muon.megatron_lm import switching, tracker
from megatron_muon.megatron_lm.flags.namespace import is_on

# The optimizer's name in a checkpoint's arguments. The saver of tools/checkpoint hands
# them to validate_args of a Megatron without the plugin. In 0.16 and 0.17 it refuses a
# name with "muon" in it together with use_distributed_optimizer.
SAVED_NAME = "Muon"


def generate_state_dict(
    original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any
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
    original: Callable[..., Any], iteration: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Megatron's save. With ``--ckpt-format torch`` the digest is written after it.

    For other formats ``mcore.load_check.save`` does so before Megatron writes its
    tracker.
    """
    given = importlib.import_module("megatron.training").get_args()
    if not is_on(given):
        return original(iteration, model, *args, **kwargs)
    named = (
        inspect.signature(original).bind(iteration, model, *args, **kwargs).arguments
    )
    with _digest_of_torch(given, named):
        return original(iteration, model, *args, **kwargs)


@contextmanager
def _digest_of_torch(given: Any, named: dict[str, Any]) -> Iterator[None]:
    """Mark the folder before ``torch.save``'s checkpoint, and write its digest after
    it.
    """
    if given.use_dist_ckpt or named.get("non_persistent_ckpt") or "://" in given.save:
        yield  # the digest comes from the wrapped dist_checkpointing
        return
    from megatron_muon.mcore.load_check.models import owner
    from megatron_muon.mcore.load_check.save import sealed

    module = _checkpointing()
    ranks = {key: named[key] for key in _RANKS if key in named}
    release = bool(named.get("release"))
    model = Path(
        module.get_checkpoint_name(given.save, named["iteration"], release, **ranks)
    )
    state = Path(module.get_distributed_optimizer_checkpoint_name(str(model)))
    folder = model.parent.parent
    names = [str(file.relative_to(folder)) for file in (model, state)]
    with sealed(owner(named["model"]), folder, names):
        yield


# Arguments of ``save_checkpoint`` by which a tool names another rank's file.
_RANKS = (
    "pipeline_parallel",
    "tensor_rank",
    "pipeline_rank",
    "expert_parallel",
    "expert_rank",
)


# --- loading --------------------------------------------------------------------------


def load_checkpoint(
    original: Callable[..., Any],
    ddp_model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's load, after a check of the checkpoint.

    With ``--override-opt_param-scheduler`` the rates are those of this run. Of AdamW's
    own loads, which are left to Megatron, a line says where they are not.
    """
    given = importlib.import_module("megatron.training").get_args()
    muon = is_on(given)
    override = given.override_opt_param_scheduler
    load_dir = getattr(given, kwargs.get("load_arg", args[0] if args else "load"))
    if not muon and not getattr(given, "adamw_from_muon", False):
        with ExitStack() as loading:
            loading.enter_context(_explained_to_others(load_dir, given))
            if override and optimizer is not None:
                from megatron_muon.megatron_lm.rates import told_of_adamw

                loading.enter_context(told_of_adamw(optimizer))
            return original(ddp_model, optimizer, opt_param_scheduler, *args, **kwargs)
    from megatron_muon.mcore.load_check.models import owner
    from megatron_muon.megatron_lm.loaded import say_loaded
    from megatron_muon.megatron_lm.rates import of_this_run

    # as Megatron does within its load
    given.finetune |= bool(
        _by_rank_0(lambda: "yes" * _is_from_pretrained(given, load_dir))
    )
    found = _by_rank_0(lambda: str(newest(given, load_dir) or ""))
    folder = Path(found) if found else None
    is_checked = False
    with ExitStack() as loading:
        if muon:
            is_checked = loading.enter_context(_checked(given, folder, ddp_model))
        how = loading.enter_context(
            switching.from_other(given, optimizer, folder, muon=muon)
        )
        loading.enter_context(tracker.naming(_checkpointing(), load_dir, _step(given)))
        loading.enter_context(
            of_this_run(optimizer, opt_param_scheduler, override=override)
        )
        result = original(ddp_model, optimizer, opt_param_scheduler, *args, **kwargs)
    if (
        muon
        and how == "own"
        and folder is not None
        and iteration_of(folder.name) is not None
    ):
        say_loaded(optimizer, owner(ddp_model), folder, is_checked=is_checked)
    return result


@contextmanager
def _explained_to_others(load_dir: str | None, given: Any) -> Iterator[None]:
    """Explain another optimizer's failed load of Muon's checkpoint; until then do
    nothing.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        from megatron_muon.mcore.checkpoint.interop.saved import Saved

        folder, whose = None, None
        with suppress(Exception):  # then Megatron's own error is raised
            folder = _latest(str(load_dir), _step(given))
            whose = Saved.of(folder).writer if folder is not None else None
        if whose != "muon":
            raise
        way = (
            "give --adamw-from-muon (Adam's moments of what Muon had start at "
            "zero), or "
        )
        if given.optimizer != "adam":
            way = f"--optimizer {given.optimizer} of Megatron's own cannot read it: "
        raise ValueError(
            f"{folder} has Muon's optimizer state: {way}load the model alone "
            "(--no-load-optim)"
        ) from error


@contextmanager
def _checked(given: Any, folder: Path | None, model: Any) -> Iterator[bool]:
    """Check the checkpoint in ``folder``, if there is one, before Megatron reads it.

    Gives whether its files were compared with a digest.
    """
    from megatron_muon.mcore.load_check.check import check, checked
    from megatron_muon.mcore.load_check.models import owner

    if folder is None:
        yield False
        return
    exact = not (given.finetune or given.no_load_optim)
    has_digest = check(owner(model), str(folder), exact)
    with checked(str(folder)):
        yield has_digest


def newest(given: Any, load_dir: str | None) -> Path | None:
    """The folder that Megatron will read, as this rank sees it; None for none or a
    local one.
    """
    module = _checkpointing()
    own = _latest(load_dir, _step(given))
    if _is_from_pretrained(given, load_dir):
        load_dir = given.pretrained_checkpoint
        own = _latest(load_dir, _step(given))
    kind, where = given.non_persistent_ckpt_type, given.non_persistent_global_ckpt_dir
    if kind not in (None, "global"):
        return None
    if kind is None or not (where or load_dir):
        return own
    where = where or os.path.join(str(load_dir), module._NON_PERSISTENT_CKPT_SUBDIR)
    beside = _latest(where, None)
    if own is None or beside is None:
        return own or beside
    numbers = [iteration_of(folder.name) for folder in (own, beside)]
    return own if None in numbers or numbers[0] > numbers[1] else beside  # type: ignore[operator]


def _is_from_pretrained(given: Any, load_dir: str | None) -> bool:
    pretrained = getattr(given, "pretrained_checkpoint", None)
    return bool(pretrained) and not (
        load_dir and _checkpointing().checkpoint_exists(load_dir)
    )


def _step(given: Any) -> int | None:
    """``--ckpt-step``; None where it is not given or 0, which is the same to
    Megatron.
    """
    return getattr(given, "ckpt_step", None) or None


def _latest(load_dir: str | None, step: int | None) -> Path | None:
    """The folder of a step, or the one that the tracker names; None without one."""
    if load_dir is None or "://" in load_dir:
        return None
    tracker.require_settled(Path(load_dir))
    name = f"iter_{step:07d}" if step is not None else tracker.named_by(Path(load_dir))
    if name is None:
        return None
    release = name == "release"
    number = 0 if release else int(name.removeprefix("iter_"))
    find = _checkpointing().get_checkpoint_name
    return Path(find(load_dir, number, release=release, return_base_dir=True))


# --- both -----------------------------------------------------------------------------


def _checkpointing() -> Any:
    return importlib.import_module("megatron.training.checkpointing")


def _by_rank_0(find: Callable[[], str]) -> str:
    """Rank 0's result of ``find`` on all ranks, since ranks may see different files."""
    from megatron_muon.mcore.host.shards import device_of
    from megatron_muon.runtime.collectives import all_gather_texts
    from megatron_muon.runtime.consensus import together

    own = together(lambda: find() if dist.get_rank() == 0 else "", None, device_of([]))
    return all_gather_texts(own, None)[0]
