"""Parts of a pickle as data beside plain values: names, and objects of unknown classes."""

from __future__ import annotations

from typing import Any, NamedTuple

_KEY_DEPTH = 8  # levels of tuples in a key; Megatron's keys have one


class PickleError(ValueError):
    """A pickle that is damaged, or that neither torch.save nor Megatron has written."""


class Name(NamedTuple):
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Unknown:
    """An object of a class for which there is no maker.

    Attributes:
        name: its class, or the function that would have made it.
        args: the arguments that it would have been made with.
        state: its attributes, or whatever its class saves; None where it has no state.
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: Name, args: tuple[Any, ...] = (), state: Any = None) -> None:
        self.name, self.args, self.state = name, args, state

    def __repr__(self) -> str:
        return f"an object of {self.name}"


def checked_key(value: Any, depth: int = 0) -> Any:
    """The value, if it may be hashed: hashing a deeply nested tuple would overflow the stack."""
    if isinstance(value, tuple) and not isinstance(value, Name):
        if depth == _KEY_DEPTH:
            raise PickleError("a key is nested too deeply")
        for each in value:
            checked_key(each, depth + 1)
    elif type(value).__hash__ is None:
        raise PickleError(f"a key is of type {type(value).__name__}")
    return value
