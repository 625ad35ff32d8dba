"""Replacement of attributes of other packages: recorded, and undone in reverse order.

Every attribute that is set in Megatron or torch, for a run or within a ``with``, goes
through ``Patches``. So ``undo()`` leaves every module, class and object with what it
had before. What someone else has put over a replacement in the meantime stays, and then
calls it: so it passes calls on by then (``around``).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from megatron_muon.presence import MuonError

_ABSENT = object()


class MissingTargetError(MuonError, RuntimeError):
    """A symbol to replace is not there: this version of torch or Megatron is not
    supported.
    """


@dataclass
class Patches:
    """All changes so far. ``undo()`` puts everything back, the last change first."""

    # the part of this package that makes the changes, for errors
    by: str = "megatron_muon"
    ABSENT = _ABSENT
    # (owner, attribute, the owner's own value before). The value is ABSENT where the
    # owner itself had no such attribute: it was inherited, or did not exist.
    changed: list[tuple[Any, str, Any]] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` (a module or class attribute) and remember what was there.

        Raises:
            MissingTargetError: there is nothing by that name to replace.
        """
        if not hasattr(owner, name):
            raise MissingTargetError(
                f"{getattr(owner, '__name__', owner)} has no {name}, which {self.by} "
                "replaces: this version of it is not known here; use one that the "
                "README lists"
            )
        self.add(owner, name, value)

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Like ``set``, but the attribute may be missing."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self.changed.append((owner, name, before))
        self._stack.callback(
            _put_back, owner, name, vars(owner).get(name, _ABSENT), before
        )

    def set_existing(self, owner: Any, name: str, value: Any) -> None:
        """Like ``set``, but does nothing where this version lacks the attribute.

        Only for attributes that some versions are known to lack because they do not
        need them.
        """
        if hasattr(owner, name):
            self.set(owner, name, value)

    def everywhere(
        self, changes: Mapping[str, tuple[Any, Any]], within: str = ""
    ) -> None:
        """Replace ``{name: (old, new)}`` in every module that has old under name, also
        by import.

        Undo gives old to every module that then has new, also one that imported it in
        the meantime. A reference under another name is not found, so after the undo new
        must pass calls on to old. ``within`` is what the names of these modules begin
        with.
        """
        _swap(changes, within)
        back = {name: (new, old) for name, (old, new) in changes.items()}
        self._stack.callback(_swap, back, within)

    def on_undo(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` on undo, for a change that is not an attribute."""
        self._stack.callback(callback)

    def is_on(self) -> bool:
        """Whether there is a change to undo."""
        return bool(self.changed)

    def undo(self) -> None:
        """Put everything back; a second call does nothing."""
        self._stack.close()
        self.changed.clear()


def _put_back(owner: Any, name: str, ours: Any, before: Any) -> None:
    """Undo a change, unless someone has put their own wrapper over ours: theirs
    stays.
    """
    if vars(owner).get(name, _ABSENT) is not ours:
        return
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def _swap(changes: Mapping[str, tuple[Any, Any]], within: str) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(within):
            namespace = getattr(module, "__dict__", {})
            for name, (old, new) in changes.items():
                if namespace.get(name) is old:
                    namespace[name] = new


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """A context in which a module, class or object has these attributes, if it has them
    at all.

    A function whose caller outlives the context then calls what was there before.
    """
    patches = Patches()
    try:
        for name, value in attributes.items():
            if isinstance(value, FunctionType) and hasattr(owner, name):
                value = around(getattr(owner, name), _in_place_of(value), patches.is_on)
            patches.set_existing(owner, name, value)
        yield
    finally:
        patches.undo()


def _in_place_of(value: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return value(*args, **kwargs)

    return wrapper


def around(
    original: Callable[..., Any], wrapper: Callable[..., Any], is_on: Callable[[], bool]
) -> Any:
    """A function that calls ``wrapper(original, ...)``, with the signature of
    ``original``.

    A caller that keeps it after the undo, when ``is_on`` returns False, calls
    ``original`` by it.
    """

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not is_on():
            return original(*args, **kwargs)
        return wrapper(original, *args, **kwargs)

    return wrapped


def turn_into(built: Any, subclass: type) -> None:
    """Change the class of an object that Megatron made to a subclass of it.

    This is the one change that ``uninstall()`` leaves: an optimizer keeps its new
    class.
    """
    built.__class__ = subclass
