"""Settings of MuonConfig as flags of this package's commands, made from their rows."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Callable, Sequence
from typing import Any

from megatron_muon.settings.config import ROWS
from megatron_muon.settings.rows import Row

HOMES = ("homes", "rank_tflops", "link_gbytes", "node_ranks")
NEWTON_SCHULZ = ("ns_coefficients", "ns_iteration", "ns_dtype", "ns_steps")
_KINDS = {int: "a whole number", float: "a number"}


def add_settings(group: _ArgumentGroup, fields: Sequence[str]) -> None:
    """Add the flags of some settings, which read a value as a run does."""
    for row in map(ROWS.__getitem__, fields):
        flag = row.flags[0]
        group.add_argument(
            *(other.option for other in row.flags if other.kind.read is flag.kind.read),
            dest=row.field,
            type=_reader(row),
            default=row.default,
            metavar="|".join(flag.kind.choices) or flag.kind.metavar or "N",
            help=f"{flag.says.split('. ')[0].rstrip('.')}. {flag.without}",
        )


def settings_of(flags: Namespace, fields: Sequence[str]) -> dict[str, Any]:
    """The settings of MuonConfig that the flags of ``add_settings`` give."""
    return {field: getattr(flags, field) for field in fields}


def _reader(row: Row) -> Callable[[str], Any]:
    kind = row.flags[0].kind

    def read(text: str) -> Any:
        try:
            value = kind.type(text)
        except ValueError as error:
            wanted = _KINDS[kind.type]  # type: ignore[index]
            raise ArgumentTypeError(f"must be {wanted}, got {text!r}") from error
        try:
            setting = kind.read(value)
            row.require(setting)
        except (TypeError, ValueError) as error:
            raise ArgumentTypeError(str(error)) from error
        return setting

    return read
