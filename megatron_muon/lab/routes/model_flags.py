"""A run by its command line: the script and its arguments, or a preset of a model."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import textwrap
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import NoReturn

import megatron_muon
from megatron_muon.console import printable
from megatron_muon.lab.dry_run.flags import add_megatron_flags, add_rank_flags
from megatron_muon.lab.dry_run.model import Run, ranks_of
from megatron_muon.lab.dry_run.numbers import MOST_RANKS, count
from megatron_muon.lab.dry_run.presets import PRESETS
from megatron_muon.lab.dry_run.seams import ROWS
from megatron_muon.lab.progress import announce
from megatron_muon.mcore.host.loop import host
from megatron_muon.megatron_lm.flags.namespace import leaves_buckets
from megatron_muon.megatron_lm.flags.parser import add_flags
from megatron_muon.presence import CoreNotFoundError, MuonError, require_core
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.flags import muon_config

# Megatron or the plugin refuses the flags: an error of the user's, which is printed as
# argparse prints its own.
REFUSALS = (ValueError, NotImplementedError, AssertionError, RuntimeError)
USAGE = "{0} [OPTIONS] --world-size N SCRIPT ITS-ARGUMENTS...\n"
USAGE += "       {0} [OPTIONS] --model NAME [FLAGS...]"
OF_MODELS = f"""\
SCRIPT is the run's own, such as pretrain_gpt.py in a Megatron-LM checkout, with
its arguments behind it as the run has them: it parses them and builds its model
itself. Without a checkout --model has presets:
{textwrap.fill(", ".join(PRESETS), 78)}.
Megatron-LM's flags of a GPT, of its ranks (--tp, --pp, --cp, --ep, --etp) and
of its buckets change them, and Muon's flags can be given as well."""


class CommandLine:
    """A command line that asks for a run.

    It has the command's options, then the run's script and the script's arguments, or
    among the options a GPT's flags.
    """

    def __init__(self, parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
        """Read it, with the parser of the command's options; argparse may end the
        process.
        """
        scripts = [word for word in argv if word.endswith(".py") and word[0] != "-"]
        end = argv.index(scripts[0]) if scripts else len(argv)
        self.script = Path(scripts[0]).resolve() if scripts else None
        self._parser = parser
        self._options = list(argv[:end])
        self._arguments = list(argv[end + 1 :])  # of the script
        _add_model(parser)
        if self.script is None:
            _add_model_flags(parser)
        self.args = self.options()
        if self.script is not None and self.args.model is not None:
            parser.error("--model takes the place of a script: use only one of the two")

    def options(self, flags: Sequence[str] = ()) -> Namespace:
        """The command's options and a preset's flags; ``flags`` may have more of
        them.
        """
        words = [*self._options, *self._split(flags)[0]]
        parsed, unknown = self._parser.parse_known_args(words)
        if unknown:
            where = "the run's own go behind its script's name"
            if self.script is None:
                where = f"without a run's script only a GPT's flags are known; {where}"
            self._parser.error(f"unrecognized arguments: {' '.join(unknown)}: {where}")
        if parsed.model is not None and self.script is None:
            parsed = self._parser.parse_args([*PRESETS[parsed.model].split(), *words])
        return parsed

    def settled(self, flags: Sequence[str] = ()) -> Run:
        """The run, with further flags of the command or of the run.

        Raises:
            ValueError, NotImplementedError, AssertionError, RuntimeError: Megatron or
                the plugin refuses it.
        """
        options = self.options(flags)
        if self.script is None:
            options.world_size = _world_size(options, options)
            config = muon_settings(options)
            return Run(options, config, ranks_of(options), leaves_buckets(options))
        from megatron_muon.lab.dry_run.script import arguments_of

        arguments = [*self._arguments, *self._split(flags)[1]]
        parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        add_rank_flags(parser)
        sizes = parser.parse_known_args(arguments)[0]
        world_size = _world_size(options, sizes)
        if world_size is None and "WORLD_SIZE" in os.environ:
            world_size = int(os.environ["WORLD_SIZE"])
        sizes.world_size = world_size
        sizes.virtual_pipeline_model_parallel_size = None
        with megatron_is_quiet():
            args, config, notes = arguments_of(
                self.script, arguments, world_size or ranks_of(sizes).world
            )
        return Run(args, config, ranks_of(args), host().leaves_buckets, tuple(notes))

    def _split(self, flags: Sequence[str]) -> tuple[list[str], list[str]]:
        """The flags that are the command's options, and those of the script."""
        options: list[str] = []
        arguments: list[str] = []
        into = options
        for word in flags:
            if word.startswith("--"):
                is_option = self._parser._option_string_actions.get(
                    word.partition("=")[0]
                )
                into = options if is_option or self.script is None else arguments
            into.append(word)
        return options, arguments


def import_megatron(program: str, script: Path | None = None) -> None:
    """Import Megatron, that of the checkout of a script, or end the process with an
    error.
    """
    try:
        if script is None:
            require_core()
        announce(f"{program}: importing torch and Megatron")
        with megatron_is_quiet():
            if script is not None:
                from megatron_muon.lab.dry_run.script import prepare

                prepare(script)
            if not megatron_muon.cpu.enabled():
                # nothing here runs on a device
                megatron_muon.cpu.enable(allow_cuda=True)
            importlib.import_module("megatron.core.transformer")

            from megatron_muon.mcore.seams.rows import check_rows

            check_rows(ROWS)
    except CoreNotFoundError:
        raise  # ``commands.main`` prints its message, which says how to get a core
    except (MuonError, FileNotFoundError) as error:
        stop(str(error), program)
    except ImportError as error:
        why = f"megatron.core cannot be imported ({error})"
        stop(f"{why}; megatron-muon doctor says more", program)


def stop(text: str, program: str) -> NoReturn:
    """End the process as argparse does for a wrong flag."""
    print(f"{program}: error: {printable(text, kept=chr(10))}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def megatron_is_quiet() -> Iterator[None]:
    """A context without Megatron's warnings, such as of missing Apex; prints go to
    stderr.
    """
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
    if flags.muon_backend == "upstream":
        raise ValueError(
            "--muon-backend upstream is not supported here, where the plugin's Muon "
            "has its own defaults: remove it, and give the values themselves"
        )
    return muon_config(flags)


def said(error: BaseException) -> str:
    """The error's text; for an assertion without one, the place where it was raised."""
    if str(error):
        return str(error)
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback is not None
    code = traceback.tb_frame.f_code
    return (
        f"{type(error).__name__} in {code.co_name} "
        f"({code.co_filename}:{traceback.tb_lineno})"
    )


def _world_size(options: Namespace, sizes: Namespace) -> int | None:
    """The number of ranks that the command's options state."""
    dp: int | None = options.dp
    stated: int | None = options.world_size
    if dp is None:
        return stated
    if stated is not None:
        raise ValueError(
            "--dp and --world-size both state the number of ranks: use only one of the "
            "two"
        )
    tp, pp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    return dp * int(tp * pp * sizes.context_parallel_size)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add Muon's flags and those of Megatron's that describe a GPT, all hidden from
    ``--help``.
    """
    before = set(parser._actions)
    add_flags(parser)
    for action in set(parser._actions) - before:
        action.help = argparse.SUPPRESS
    add_megatron_flags(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add, ranks = parser.add_argument, count(most=MOST_RANKS)
    add("--model", choices=PRESETS, metavar="NAME", help="a preset, in place of SCRIPT")
    text = "number of ranks (default: WORLD_SIZE, or as few as the sizes allow)"
    add("--world-size", type=ranks, metavar="N", help=text)
    add(
        "--dp",
        type=ranks,
        metavar="N",
        help="data-parallel size, in place of --world-size",
    )
