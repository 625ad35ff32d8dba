"""Muon's flags on Megatron-LM's parser, and what parsed arguments say of them.

Flags have three sources: the proof of concept of this work, Megatron-LM's own Muon (core 0.16 and
later; ``megatron/training/arguments.py``) and this plugin. All are accepted with every Megatron
version. A flag keeps the meaning that it has at its source, or is an error; none is ignored.

Every default is None, which shows the flags that were given. Megatron's own defaults are kept in
``args.megatron_muon_defaults``, by dest.
"""

from __future__ import annotations

import argparse
from argparse import Namespace

from megatron_muon.megatron_lm.flags.table import FLAGS, OF_ANY
from megatron_muon.megatron_lm.flags.values import (
    KEPT,
    own_defaults,
    upstreams_values,
    value_given,
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``muon`` to the choices of ``--optimizer``, and every flag of Muon's.

    Args:
        parser: a parser with all of Megatron's arguments. Flags that it already has keep their
            action and type.
    """
    actions = parser._option_string_actions
    optimizer = actions.get("--optimizer")
    if optimizer is not None and optimizer.choices and "muon" not in optimizer.choices:
        optimizer.choices = [*optimizer.choices, "muon"]
    known = {flag.option for flag in FLAGS}
    own = {
        action.dest: action.default
        for option, action in actions.items()
        if option.startswith("--muon-") or option in known
    }
    group = parser.add_argument_group("distributed muon")
    for flag in FLAGS:
        if flag.option in actions:
            actions[flag.option].help = flag.help
        else:
            group.add_argument(flag.option, default=None, help=flag.help, **flag.keywords)
    parser.set_defaults(**dict.fromkeys(own), **{KEPT: own})


def mend_help(parser: argparse.ArgumentParser) -> None:
    """Double the percent signs of help texts that argparse cannot print, so that ``--help`` works.

    Megatron-LM has such texts from 0.18 on; its own ``--help`` ends in a ValueError.
    """
    formatter = parser._get_formatter()
    for action in parser._actions:
        if not action.help:
            continue
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")


def muon_backend(args: Namespace) -> str:
    """The implementation of ``--optimizer muon``: ``plugin``, or ``upstream`` (Megatron's own).

    Raises:
        ValueError: upstream is asked for, and this Megatron has no Muon of its own, or lacks
            another flag that is given.
    """
    if value_given(args, "muon_backend") != "upstream":
        return "plugin"
    if not hasattr(args, KEPT):
        return "upstream"  # ``leave_to_megatron`` has already handled these arguments
    if not upstreams_values(args):
        raise ValueError(
            "--muon-backend upstream: this Megatron has no Muon of its own (core 0.16 and later "
            "have); leave it out"
        )
    foreign = foreign_flags(args, {*own_defaults(args), "muon_backend", *OF_ANY})
    if foreign:
        raise ValueError(
            f"--muon-backend upstream leaves everything to Megatron's own Muon, which has no "
            f"{', '.join(foreign)} in this version: leave out one or the other"
        )
    return "upstream"


def foreign_flags(args: Namespace, dests: set[str]) -> list[str]:
    """The given options of ``FLAGS`` whose dest is not in ``dests``."""
    return [
        flag.option
        for flag in FLAGS
        if flag.dest not in dests and value_given(args, flag.dest) is not None
    ]


def restore_defaults(args: Namespace) -> None:
    """Set Megatron's own default again for every flag that was not given.

    Call it after ``muon_config`` and ``differences``, which must know the flags that were given.
    """
    for dest, default in own_defaults(args).items():
        if value_given(args, dest) is None:
            setattr(args, dest, default)
