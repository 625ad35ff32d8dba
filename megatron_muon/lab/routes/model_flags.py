"""A model by Megatron's flags: what the commands that build one without a GPU have in common."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import logging
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import megatron_muon
from megatron_muon.config import MuonConfig
from megatron_muon.lab.dry_run.flags import add_megatron_flags
from megatron_muon.lab.dry_run.hybrid.settings import settle
from megatron_muon.megatron_lm.flags.parser import add_flags
from megatron_muon.megatron_lm.flags.settings import muon_config
from megatron_muon.presence import CoreNotFoundError

if TYPE_CHECKING:
    from megatron_muon.lab.dry_run.model import Ranks
    from megatron_muon.mcore.seams.row import Part

# Megatron or the plugin refuses the flags: the user's error, to be said as argparse does.
REFUSALS = (ValueError, NotImplementedError, AssertionError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Settled:
    """A run that flags ask for.

    Attributes:
        config: Muon's settings.
        ranks: how its ranks are divided.
        notes: what there is to say about the choice of buckets.
    """

    config: MuonConfig
    ranks: Ranks
    notes: list[str]


def settled(flags: Namespace) -> Settled:
    """Check the flags and choose, in place, what a run would choose: layers and buckets.

    Args:
        flags: of a parser with ``add_model_flags``.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: Megatron or the plugin
            refuses them.
    """
    from megatron_muon.lab.dry_run.model import ranks_of, validated
    from megatron_muon.megatron_lm.bucketing import choose_buckets

    settle(flags)
    config = muon_settings(flags)
    ranks = ranks_of(flags)
    with megatron_is_quiet():
        args = validated(flags, ranks)
        notes = choose_buckets(args)
    flags.ddp_num_buckets = args.ddp_num_buckets
    return Settled(config, ranks, notes)


def add_model_flags(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Muon's flags and Megatron's.

    Args:
        parser: made with ``allow_abbrev=False``.
        config_class: ``imported_config_class()``.
    """
    add_flags(parser)
    add_megatron_flags(parser, config_class)


def imported_config_class(program: str, *parts: Part) -> type:
    """Import Megatron, and return its TransformerConfig.

    Args:
        program: name of the command, for the error that ends the process where that fails.
        parts: of what the package relies on, to be checked beside ``dry_run``.
    """
    from megatron_muon.mcore.seams.rows import SeamError, check_part

    with megatron_is_quiet():
        try:
            if not megatron_muon.cpu.enabled():
                megatron_muon.cpu.enable(allow_cuda=True)  # nothing here runs on a device
            transformer = importlib.import_module("megatron.core.transformer")
            check_part("dry_run", *parts)
        except CoreNotFoundError:
            raise  # ``cli.main`` prints its message, which says how to get a core
        except SeamError as error:
            stop(str(error), program)
        except ImportError as error:
            stop(
                f"megatron.core cannot be imported ({error}); megatron-muon doctor says more",
                program,
            )
    config_class: type = transformer.TransformerConfig
    return config_class


def stop(text: str, program: str) -> NoReturn:
    """End the process as argparse does for a wrong flag."""
    print(f"{program}: error: {text}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def megatron_is_quiet() -> Iterator[None]:
    """Within it Megatron's warnings, such as of missing Apex, are off; prints go to stderr."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def muon_settings(flags: Namespace) -> MuonConfig:
    """The settings of a run with these flags; Muon's flags are checked as in a run."""
    from megatron_muon.megatron_lm.bucketing import aligns_shards

    for option, value in (
        ("--muon-backend", flags.muon_backend),
        ("--muon-defaults", flags.muon_defaults),
    ):
        if value == "upstream":
            raise ValueError(
                f"{option} upstream is not supported: this is about the plugin's Muon, with its "
                "own defaults; leave it out, and give the values themselves"
            )
    return dataclasses.replace(muon_config(flags), align_shards=aligns_shards(flags))


def said(error: BaseException) -> str:
    """The error's text; for an assertion without one, the place where it was raised."""
    if str(error):
        return str(error)
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback is not None
    code = traceback.tb_frame.f_code
    return f"{type(error).__name__} in {code.co_name} ({code.co_filename}:{traceback.tb_lineno})"
