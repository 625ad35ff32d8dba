"""``accept.json``: outcomes so far, and whether a call may go on with them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_muon.files.durable import write_text
from megatron_muon.lab.accept.outcome import Outcome, as_json, failed, from_json

NAME, REPORT = "accept.json", "accept.md"
_MOST_BYTES = 1 << 26
_ENDS = 2  # calls that end within a check, after which it is not tried again


@dataclass(slots=True)
class Record:
    """The outcomes of one or more calls with the same identity.

    Attributes:
        identity: what the outcomes depend on.
        environment: the machine and its software, in words.
        outcomes: by check.
        running: the check that runs now, or ran when the last call ended.
        ended: by check, number of calls that ended while it ran.
    """

    identity: dict[str, str]
    environment: dict[str, str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    running: str = ""
    ended: dict[str, int] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the file; it has either all of it or what it had.

        Raises:
            OSError: it cannot be written.
        """
        write_text(folder / NAME, self.as_text())

    def as_text(self) -> str:
        """All of it as JSON."""
        made = {
            "identity": self.identity,
            "environment": self.environment,
            "running": self.running,
            "ended": self.ended,
            "outcomes": [as_json(outcome) for outcome in self.outcomes.values()],
        }
        return json.dumps(made, indent=1) + "\n"

    def is_settled(self, check: str) -> bool:
        """Whether a check has a final outcome."""
        return check in self.outcomes and self.outcomes[check].is_final


def resumed(
    folder: Path, identity: dict[str, str], environment: dict[str, str]
) -> tuple[Record, str]:
    """The record to go on with, and a line that says what it is.

    A record with another identity, or one that cannot be read, is kept under another name.

    Raises:
        OSError: the folder cannot be read or written.
    """
    new = Record(identity, environment)
    path = folder / NAME
    if not path.exists():
        return new, "a new record"
    try:
        old = _read(path)
    except (ValueError, RecursionError) as error:
        return new, f"starts anew: {path} cannot be read ({error}); {_put_aside(folder)}"
    changed = [
        f"{name} was {old.identity.get(name, 'not named')}, is {value}"
        for name, value in identity.items()
        if old.identity.get(name) != value
    ]
    if changed:
        return new, f"starts anew: {'; '.join(changed)}; {_put_aside(folder)}"
    old.environment = environment
    said = f"goes on after {len(old.outcomes)} check(s) of {path}"
    return old, said + _after_an_end(old)


def _after_an_end(record: Record) -> str:
    """Handle a check that ran when the last call ended; returns words for the line."""
    name = record.running
    if not name:
        return ""
    record.running = ""
    record.ended[name] = record.ended.get(name, 0) + 1
    if record.ended[name] < _ENDS:
        return f"; {name} ran when the last call ended, and is tried again"
    why = f"{record.ended[name]} calls of the command ended while it ran"
    record.outcomes[name] = failed(name, why)
    return f"; {name} is not tried again: {why}"


def _put_aside(folder: Path) -> str:
    names = []
    for name in (NAME, REPORT):
        if (folder / name).exists():
            os.replace(folder / name, folder / f"old.{name}")
            names.append(f"old.{name}")
    return f"what was there is now {' and '.join(names)}"


def _read(path: Path) -> Record:
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    given = json.loads(path.read_text())
    if not isinstance(given, dict):
        raise ValueError("it is no JSON object")
    outcomes = given.get("outcomes")
    if not isinstance(outcomes, list):
        raise ValueError("it has no list of outcomes")
    made = [from_json(each) for each in outcomes]
    running = given.get("running")
    if not isinstance(running, str):
        raise ValueError("running is no text")
    return Record(
        _mapping("identity", given.get("identity"), str),
        _mapping("environment", given.get("environment"), str),
        {outcome.check: outcome for outcome in made},
        running,
        _mapping("ended", given.get("ended"), int),
    )


def _mapping(name: str, given: Any, kind: type) -> dict[str, Any]:
    if not isinstance(given, dict) or not all(isinstance(each, kind) for each in given.values()):
        raise ValueError(f"{name} is no object of {kind.__name__}")
    return given
