"""The import that the patch adds at the end of ``megatron/training/__init__.py``.

It adds Muon's flags to the parser. A run without ``--optimizer muon`` is otherwise as
without the plugin, also where Muon could not run. For a run with it, the launcher's
checks follow once the arguments are parsed. On a Megatron whose version is not
supported, a run that asks for Muon ends.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from megatron_muon.console import say_once
from megatron_muon.megatron_lm.flags.parser import muons_on
from megatron_muon.megatron_lm.install import asks_for_muon, install_training, wrap
from megatron_muon.megatron_lm.launch import (
    ON_CPU,
    check_installation,
    hide_gpus,
    without_gpu,
)
from megatron_muon.presence import SeamError, require_core
from megatron_muon.runtime.patches import Function
from megatron_muon.settings.flags import MUONS

_fault: SeamError | None = None  # the reason why Muon cannot run with this Megatron


def _install() -> None:
    try:
        require_core()
    except SeamError as error:
        _has_no_muon(error)
        _stop_muon()
        return
    if ON_CPU in sys.argv:
        hide_gpus()  # before this process uses one
    try:
        install_training()
    except SeamError as error:  # must not stop a run that does not ask for Muon
        _has_no_muon(error)
    wrap("megatron.training.arguments", "validate_args", _validate_args)
    wrap("megatron.training.initialize", "initialize_megatron", _initialize_megatron)


def _has_no_muon(fault: SeamError) -> None:
    global _fault
    _fault = fault
    say_once(f"[megatron_muon] no --optimizer muon here: {fault}")


def _stop_muon() -> None:
    """Stop runs with ``--optimizer muon``, which would get Megatron's own; no others.

    This Megatron may be of any shape, so the command line is asked first.
    """
    for name in muons_on(sys.argv[1:]):
        _refuse(Namespace(optimizer=name))
    for name in ("parse_args", "validate_args"):
        with contextlib.suppress(ImportError, AttributeError):
            wrap("megatron.training.arguments", name, _refuse_around)


def _refuse(args: Any) -> None:
    if _fault is not None and getattr(args, "optimizer", None) in MUONS:
        raise _fault


def _refuse_around(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Parsing, of a YAML file too, returns the arguments; validation takes them."""
    for argument in args:
        _refuse(argument)
    result = original(*args, **kwargs)
    _refuse(result)
    return result


def _validate_args(original: Function, args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Check the installation and turn on the CPU runtime before Megatron validates and
    builds.
    """
    if asks_for_muon(args):
        if _fault is not None:
            raise _fault
        training = str(importlib.import_module("megatron.training").__file__)
        check_installation(Path(training).resolve().parents[2])
    if _runs_on_cpu(args):
        without_gpu(late=True)
    return original(args, *rest, **kwargs)


def _runs_on_cpu(args: Any) -> bool:
    """Whether a run uses the CPU where there is no GPU: with Muon, or with
    ``--muon-cpu``.
    """
    return asks_for_muon(args) or bool(getattr(args, "muon_cpu", None))


def _initialize_megatron(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Without a GPU, parse the arguments first: up to 0.17 Megatron asserts one
    before.
    """
    signature = inspect.signature(original)
    call = signature.bind(*args, **kwargs)
    asked = call.arguments
    parses = "parsed_args" in signature.parameters
    if not parses or asked.get("allow_no_cuda") or torch.cuda.is_available():
        return original(*args, **kwargs)
    if asked.get("parsed_args") is None:
        parse_args = importlib.import_module("megatron.training.initialize").parse_args
        asked["parsed_args"] = parse_args(
            asked.get("extra_args_provider"), asked.get("ignore_unknown_args", False)
        )
    asked["allow_no_cuda"] = _runs_on_cpu(asked["parsed_args"])
    return original(*call.args, **call.kwargs)


_install()
