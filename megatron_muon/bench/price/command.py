"""``megatron-muon bench price``: the time of an optimizer step on stated hardware."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon.dry_run.numbers import MOST_THINGS, count
from megatron_muon.files.writable import require_writable
from megatron_muon.pricing.hardware import CONSTANTS, Hardware, from_json
from megatron_muon.pricing.presets import H100, PRESETS

if TYPE_CHECKING:
    from megatron_muon.bench.price.stages import PricedStage

_PROGRAM = "megatron-muon bench price"
_DESCRIPTION = """\
Estimate the time of an optimizer step of a model that is given by Megatron-LM's own flags: with
AdamW, with our Muon by each Newton-Schulz iteration, and with Megatron's own Muon. The exchange
plans are those of a run; a time model simulates both streams of every rank in every round on the
stated hardware. Nothing is measured, and neither a GPU nor a launcher is needed. Every assumption
is printed and every constant can be set. docs/time_model.md says how well the model predicts."""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        0; wrong arguments end the process with status 2, as argparse does.
    """
    from megatron_muon.cli.model_flags import REFUSALS, imported_config_class, said

    parser = _parser(imported_config_class(_PROGRAM))
    given = parser.parse_args(argv)
    try:
        hardware = hardware_of(given.hardware, given.set)
        if given.json is not None:
            require_writable("--json", given.json)
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    try:
        stages, notes = _priced(given, hardware)
    except REFUSALS as error:
        parser.error(said(error))
    from megatron_muon.bench.price.report import as_json, as_text

    print(as_text(stages, hardware, notes))
    if given.json is not None:
        given.json.write_text(as_json(stages, hardware, notes))
    return 0


def priced_of(
    argv: Sequence[str], hardware: Hardware, *more: Mapping[str, Any]
) -> tuple[list[PricedStage], list[str]]:
    """The priced stages, and notes on them.

    Args:
        argv: Megatron-LM's flags and this command's own; flags for hardware are ignored.
        hardware: hardware of every rank.
        more: changes of settings to price, in addition to ``stages.VARIANTS``.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: see ``stages.routes``.
    """
    from megatron_muon.cli.model_flags import imported_config_class

    return _priced(_parser(imported_config_class(_PROGRAM)).parse_args(argv), hardware, *more)


def hardware_of(name: str, settings: Sequence[str]) -> Hardware:
    """The hardware that a command line states.

    Args:
        name: name of a preset, or path of a JSON file.
        settings: ``name=value`` for each constant to change.

    Raises:
        ValueError, TypeError, OSError: ``name`` is neither, or a constant is wrong.
    """
    if name in PRESETS:
        hardware = PRESETS[name]
    elif Path(name).is_file():
        hardware = from_json(Path(name).read_text(), name, H100)
    else:
        raise ValueError(
            f"--hardware {name}: neither a file nor one of {', '.join(PRESETS)}; a file is JSON, "
            '{"name": ..., "values": {constant: number}, "sources": {constant: text}}'
        )
    values: dict[str, Any] = {}
    for setting in settings:
        constant, equals, text = setting.partition("=")
        if not equals or constant not in CONSTANTS or constant == "tiles":
            names = ", ".join(known for known in CONSTANTS if known != "tiles")
            raise ValueError(f"--set {setting}: give NAME=VALUE, where NAME is one of {names}")
        values[constant] = _number(setting, text)
    return hardware.with_values(values, "--set")


def _number(setting: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--set {setting}: {text!r} is not a number") from None


def _priced(
    given: Namespace, hardware: Hardware, *more: Mapping[str, Any]
) -> tuple[list[PricedStage], list[str]]:
    from megatron_muon.bench.price.stages import VARIANTS, priced_stage
    from megatron_muon.cli.model_flags import megatron_is_quiet, settled

    run = settled(given)
    config, ranks, notes = run.config, run.ranks, run.notes
    with megatron_is_quiet():
        numbers = range(ranks.pp) if given.stage is None else [given.stage]
        if numbers[-1] >= ranks.pp:
            raise ValueError(f"--stage {numbers[-1]}: the last pipeline stage is {ranks.pp - 1}")
        stages = [
            priced_stage(
                given,
                config,
                ranks,
                number,
                hardware,
                (*VARIANTS, *more),
            )
            for number in numbers
        ]
    notes.append(
        f"matrices of one shape that are taken together: {config.ns_batch or 'as many as fit'}"
    )
    return stages, notes


def _parser(config_class: type) -> argparse.ArgumentParser:
    from megatron_muon.cli.model_flags import add_model_flags
    from megatron_muon.dry_run.numbers import MOST_RANKS

    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        usage=f"{_PROGRAM} FLAGS --world-size N [--hardware NAME|FILE] (--help lists them)",
        description=_DESCRIPTION,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world-size", type=count(most=MOST_RANKS), required=True, metavar="N")
    parser.add_argument(
        "--hardware",
        default="h100",
        metavar="NAME|FILE",
        help=f"{', '.join(PRESETS)}, or a JSON file of constants (%(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another value of a constant; may be given several times",
    )
    parser.add_argument(
        "--stage", type=count(0, MOST_THINGS), metavar="N", help="only this pipeline stage"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures and constants")
    add_model_flags(parser, config_class)
    return parser
