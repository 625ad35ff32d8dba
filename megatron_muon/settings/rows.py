"""A setting as one row: field, default, check, flags and help.

``MuonConfig``'s fields are rows (``config``); ``run_flags`` has the rows without a field. From them
come the parser, the checks, the names in messages, what is in force, and docs/flags.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron_muon.settings.checks import Check, choice

OURS, UPSTREAM, CONCEPT = "megatron_muon", "Megatron's own Muon", "the proof of concept"
_KEY = "megatron_muon"


def same(value: Any) -> Any:
    """A flag's value that is the setting's."""
    return value


def reverse(value: Any) -> bool:
    """A switch that turns a setting off."""
    return not value


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag on Megatron-LM's command line.

    Attributes:
        option: the flag with its dashes.
        says: sentences: what it does, its unit, when to change it.
        source: where the flag comes from; it keeps the meaning that it has there.
        without: a sentence about what holds without the flag; empty: the row's default.
        type: makes a value of a text.
        choices: the values that it takes; empty: any of its type.
        metavar: what ``--help`` calls the value.
        action: argparse's.
        name: the argument's name, if not made of the option.
        read: the setting that a value of the flag means; None: none.
        write: the value of the flag that means a setting.
    """

    option: str
    says: str
    source: str = OURS
    without: str = ""
    type: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    action: Literal["store", "store_true", "store_false", "append"] = "store"
    name: str = ""
    read: Callable[[Any], Any] = same
    write: Callable[[Any], Any] = same

    @property
    def dest(self) -> str:
        """The argument's name."""
        return self.name or self.option[2:].replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.action.startswith("store_")

    @property
    def help(self) -> str:
        """The text for ``--help`` and docs/flags.md."""
        return f"{self.says} A flag of {self.source}. {self.without}"

    @property
    def keywords(self) -> dict[str, Any]:
        """Those of ``add_argument``."""
        given: dict[str, Any] = {"action": self.action, "dest": self.dest, "default": None}
        if not self.is_switch:
            given |= {"type": self.type, "metavar": self.metavar, "choices": self.choices or None}
        return given


@dataclass(frozen=True, slots=True)
class Only:
    """The only values of a flag of Megatron's own Muon that have a meaning here."""

    values: tuple[Any, ...]
    why: str
    way_out: str


@dataclass(frozen=True, slots=True)
class Row:
    """One setting.

    Attributes:
        field: its field of ``MuonConfig``; empty for what is no setting of the optimizer.
        default: the value without a flag.
        check: raises TypeError or ValueError for a value that the setting cannot have.
        flags: those that set it. Messages name the first.
        only: where most values have no meaning here.
    """

    field: str
    default: Any
    check: Check
    flags: tuple[Flag, ...]
    only: Only | None = None

    @property
    def named(self) -> str:
        """The setting in a message: its field with its flag."""
        option = self.flags[0].option
        return f"{self.field} ({option})" if self.field else option

    def require(self, value: Any) -> None:
        """Raise TypeError or ValueError, with field and flag, for a value that it cannot have."""
        self.check(self.named, value)


def row(
    default: Any,
    option: str,
    says: str,
    *,
    check: Check | None = None,
    aliases: tuple[Flag, ...] = (),
    **of_flag: Any,
) -> Any:
    """A field of a dataclass that is a row; further keywords are those of its ``Flag``.

    Without a check it must be one of the flag's choices.
    """
    made = free_row(default, option, says, check=check, aliases=aliases, **of_flag)
    return dataclasses.field(default=default, metadata={_KEY: made})


def free_row(
    default: Any,
    option: str,
    says: str,
    *,
    check: Check | None = None,
    aliases: tuple[Flag, ...] = (),
    only: Only | None = None,
    **of_flag: Any,
) -> Row:
    """A row without a field."""
    flags = (Flag(option, says, **of_flag), *aliases)
    told = tuple(
        dataclasses.replace(f, without=f.without or f"The default is {f.write(default)}.")
        for f in flags
    )
    return Row("", default, check or choice(told[0].choices), told, only)


def rows_of(settings: type[Any]) -> dict[str, Row]:
    """The rows of a dataclass by field."""
    return {
        field.name: dataclasses.replace(field.metadata[_KEY], field=field.name)
        for field in dataclasses.fields(settings)
    }
