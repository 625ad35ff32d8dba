"""The import that the patch adds at the end of ``megatron/training/__init__.py``.

It adds Muon's flags to the parser. A run without ``--optimizer muon`` is otherwise as without the
plugin, also where Muon could not run. For a run with it, the launcher's checks follow once the
arguments are parsed.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_muon.console import say
from megatron_muon.mcore.seams.rows import SeamError
from megatron_muon.megatron_lm.install import asks_for_muon, install_training, wrap
from megatron_muon.megatron_lm.launch import ON_CPU, check_installation, hide_gpus, without_gpu

_fault: SeamError | None = None  # the reason why Muon cannot run with this Megatron


def _install() -> None:
    global _fault
    if ON_CPU in sys.argv:
        hide_gpus()  # before this process uses one
    try:
        install_training()
    except SeamError as error:  # must not stop a run that does not ask for Muon
        _fault = error
        if int(os.environ.get("RANK", "0")) == 0:
            say(f"[megatron_muon] no --optimizer muon here: {error}")
    wrap("megatron.training.arguments", "validate_args", _validate_args)
    wrap("megatron.training.initialize", "initialize_megatron", _initialize_megatron)


def _validate_args(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Check the installation and turn on the CPU runtime before Megatron validates and builds."""
    if asks_for_muon(args):
        if _fault is not None:
            raise _fault
        training = importlib.import_module("megatron.training")
        assert training.__file__ is not None
        check_installation(Path(training.__file__).resolve().parents[2])
    if _runs_on_cpu(args):
        without_gpu(late=True)
    return original(args, *rest, **kwargs)


def _runs_on_cpu(args: Any) -> bool:
    """Whether a run uses the CPU where there is no GPU: with Muon, or with ``--muon-cpu``."""
    return asks_for_muon(args) or bool(getattr(args, "muon_cpu", None))


def _initialize_megatron(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Without a GPU, parse the arguments first: up to 0.17 Megatron asserts one before."""
    signature = inspect.signature(original)
    call = signature.bind(*args, **kwargs)
    given = call.arguments
    parses = "parsed_args" in signature.parameters
    if not parses or given.get("allow_no_cuda") or torch.cuda.is_available():
        return original(*args, **kwargs)
    if given.get("parsed_args") is None:
        parse_args = importlib.import_module("megatron.training.initialize").parse_args
        given["parsed_args"] = parse_args(
            given.get("extra_args_provider"), given.get("ignore_unknown_args", False)
        )
    given["allow_no_cuda"] = _runs_on_cpu(given["parsed_args"])
    return original(*call.args, **call.kwargs)


_install()
