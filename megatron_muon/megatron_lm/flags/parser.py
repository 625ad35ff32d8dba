"""Muon's flags on Megatron-LM's parser.

They have three sources: the proof of concept of this work, Megatron-LM's own Muon (core
0.16 and later; ``megatron/training/arguments.py``) and this plugin. Those of settings
are accepted with every Megatron version. A flag keeps the meaning that it has at its
source, or is an error; none is ignored.

Every default is None, which shows the flags that were given. Megatron's own defaults
are kept in ``args.megatron_muon_defaults``, by dest.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from megatron_muon.console import UNKNOWN, with_nearest
from megatron_muon.settings import left
from megatron_muon.settings.flags import (
    KEPT,
    MUONS,
)
from megatron_muon.settings.run_flags import FLAGS


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the names of Muon to the choices of ``--optimizer``, and every flag of
    Muon's.

    The parser has all of Megatron's arguments; flags that it has keep their action and
    type.
    """
    actions = parser._option_string_actions
    optimizer = actions.get("--optimizer")
    if optimizer is not None and optimizer.choices:
        missing = [name for name in MUONS if name not in optimizer.choices]
        optimizer.choices = [*optimizer.choices, *missing]
    own = {
        actions[option].dest: actions[option].default
        for option in _muons_options(parser)
    }
    group = parser.add_argument_group("distributed muon")
    for flag in FLAGS:
        if flag.option in actions:
            action = actions[flag.option]
            action.help = flag.help
            if action.choices:
                both = dict.fromkeys([*action.choices, *flag.kind.choices])
                action.choices = tuple(both)
        else:
            group.add_argument(
                flag.option,
                dest=flag.dest,
                default=None,
                help=flag.help,
                **flag.kind.keywords(),
            )
    for option, text in _ended():
        if option in actions:
            continue
        group.add_argument(
            option,
            action=_End,
            nargs="?",
            const=text,
            dest=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    parser.set_defaults(**dict.fromkeys(own), **{KEPT: own})


def _ended() -> Iterator[tuple[str, str]]:
    """Flags of another version or of a fork, and what is said of them."""
    for option, way in left.FLAGS.items():
        yield option, f"{option} was removed: {way}"
    for option, way in left.FORK.items():
        yield option, f"{option} is a flag of Moonshot's fork of Megatron; today: {way}"


class _End(argparse.Action):
    """Such a flag ends the process with its ``const``."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.exit(2, f"{parser.prog}: error: {self.const}\n")


def mend_help(parser: argparse.ArgumentParser) -> None:
    """Double the percent signs of help texts that argparse cannot print, so that
    ``--help`` works.

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


def shorten_errors(parser: argparse.ArgumentParser) -> None:
    """Have an error about unknown flags be one line with the nearest flags.

    argparse prints Megatron's usage before it, which has hundreds of lines.
    """
    error = parser.error

    def short_error(message: str) -> NoReturn:
        if not message.startswith(UNKNOWN):
            error(message)
        named = with_nearest(message, parser._option_string_actions)
        parser.exit(2, f"{parser.prog}: error: {named}\n")

    parser.error = short_error  # type: ignore[method-assign]


def given_on(parser: argparse.ArgumentParser, line: Sequence[str]) -> list[str]:
    """The options of Muon's on a command line, and ``--optimizer`` with a name of
    Muon.
    """
    known = _muons_options(parser)
    names = [f"--optimizer {name}" for name in muons_on(line)]
    return names + [word for word in line if word.split("=")[0] in known]


def muons_on(line: Sequence[str]) -> list[str]:
    """The names of Muon that ``--optimizer`` has on a command line."""
    words = itertools.chain.from_iterable(word.split("=", 1) for word in line)
    pairs = set(itertools.pairwise(words))
    return [name for name in MUONS if ("--optimizer", name) in pairs]


def _muons_options(parser: argparse.ArgumentParser) -> list[str]:
    """The options of ``FLAGS`` and of Megatron's own Muon that a parser has."""
    known = {flag.option for flag in FLAGS}
    options = parser._option_string_actions
    return [
        option for option in options if option.startswith("--muon-") or option in known
    ]
