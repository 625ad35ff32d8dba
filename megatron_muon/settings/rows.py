"""A setting as one row: field, default, kind, flags and help.

``MuonConfig``'s fields are rows (``config``); ``run_flags`` has the rows without a
field. From them come the parser, the checks, the names in messages and docs/flags.md.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from megatron_muon.settings.kinds import Kind

# Whose flag it is; it keeps the meaning that it has there.
Dialect = Literal["megatron_muon", "Megatron's own Muon", "the proof of concept"]
OURS: Dialect = "megatron_muon"
UPSTREAM: Dialect = "Megatron's own Muon"
CONCEPT: Dialect = "the proof of concept"
_KEY = "megatron_muon"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag on Megatron-LM's command line."""

    option: str  # the flag with its dashes
    says: str  # sentences: what it does, its unit, when to change it
    kind: Kind  # what its value means
    source: Dialect = OURS
    # a sentence about what holds without the flag; empty: the row's default
    without: str = ""
    name: str = ""  # the argument's name, if not made of the option
    # The argument of a flag with which a run of AdamW may have it, too; empty: only
    # Muon's runs may.
    with_adamw: str = ""

    @property
    def dest(self) -> str:
        """The argument's name."""
        return self.name or self.option[2:].replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.kind.action.startswith("store_")

    @property
    def help(self) -> str:
        """The text for ``--help`` and docs/flags.md."""
        return f"{self.says} A flag of {self.source}. {self.without}"


@dataclass(frozen=True, slots=True)
class Row:
    """One setting."""

    field: str  # its field of MuonConfig; empty for what is no setting of the optimizer
    default: Any  # the value without a flag
    flags: tuple[Flag, ...]  # messages name the first

    @property
    def named(self) -> str:
        """The setting in a message: its field with its flag."""
        option = self.flags[0].option
        return f"{self.field} ({option})" if self.field else option

    def require(self, value: Any) -> None:
        """Raise TypeError or ValueError, with field and flag, for a value that it
        cannot have.
        """
        self.flags[0].kind.check(self.named, value)


def free_row(
    default: Any,
    option: str,
    says: str,
    kind: Kind,
    *,
    aliases: tuple[Flag, ...] = (),
    **of_flag: Any,
) -> Row:
    """A row without a field; further keywords are those of its flag."""
    flags = tuple(
        dataclasses.replace(
            flag, without=flag.without or f"The default is {flag.kind.write(default)}."
        )
        for flag in (Flag(option, says, kind, **of_flag), *aliases)
    )
    return Row("", default, flags)


def row(default: Any, option: str, says: str, kind: Kind, **keywords: Any) -> Any:
    """A field of a dataclass that is a row; further keywords are those of
    ``free_row``.
    """
    made = free_row(default, option, says, kind, **keywords)
    return dataclasses.field(default=default, metadata={_KEY: made})


def rows_of(settings: type[Any]) -> dict[str, Row]:
    """The rows of a dataclass by field."""
    return {
        field.name: dataclasses.replace(field.metadata[_KEY], field=field.name)
        for field in dataclasses.fields(settings)
    }
