"""Replacement of attributes of other packages: recorded, and undone in reverse order.

Every attribute that is set in Megatron or torch, for a run or within a ``with``, goes
through ``Patches``. So ``undo()`` leaves every module, class and object with what it
had before. What someone else has put over a replacement in the meantime stays, and then
calls it: so it passes calls on by then (``around``).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

from megatron_muon.presence import MuonError

Function = Callable[..., Any]
_ABSENT = object()


class MissingTargetError(MuonError, RuntimeError):
    """A symbol to replace is not there: this version of torch or Megatron is not
    supported.
    """


class Patches:
    """All changes so far. ``undo()`` puts everything back, the last change first.

    Args:
        by: the part of this package that makes the changes, for errors.
    """

    def __init__(self, by: str = "megatron_muon") -> None:
        self._by = by
        self._changes = ExitStack()
        self._is_on = False

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` (a module or class attribute) and remember what was there.

        Raises:
            MissingTargetError: there is nothing by that name to replace.
        """
        if not hasattr(owner, name):
            raise MissingTargetError(
                f"{getattr(owner, '__name__', owner)} has no {name}, which {self._by} "
                "replaces: this version of it is not known here; use one that the "
                "README lists"
            )
        self.add(owner, name, value)

    def set_all(self, owner: Any, **attributes: Any) -> None:
        """``set`` each of these attributes."""
        for name, value in attributes.items():
            self.set(owner, name, value)

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Like ``set``, but the attribute may be missing."""
        # absent where it does not exist, or is inherited
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        ours = vars(owner).get(name, _ABSENT)
        self.on_undo(_put_back, owner, name, ours, before)

    def set_existing(self, owner: Any, name: str, value: Any) -> None:
        """Like ``set``, but does nothing where this version lacks the attribute.

        Only for attributes that some versions are known to lack because they do not
        need them.
        """
        if hasattr(owner, name):
            self.set(owner, name, value)

    def wrap(
        self, module_name: str, symbol: str, wrapper: Function, within: str = ""
    ) -> None:
        """Put ``wrapper(original, ...)`` around a function or a method; twice is once.

        A function is replaced in every module that has it by its name, also by import.
        Undo gives the original to every module that has ours by then, also one that
        imported it in the meantime. A reference under another name is not found; by it
        ours passes calls on after the undo.

        Args:
            symbol: its name in the module, or ``Class.method``.
            within: what the names of the modules that get a function begin with.
        """
        owner: Any = importlib.import_module(module_name)
        holder, _, name = symbol.rpartition(".")
        if holder:
            owner = getattr(owner, holder)
        original: Any = getattr(owner, name)
        before = getattr(original, "wrapped_by", ())
        if wrapper in before:
            return
        ours = around(original, functools.partial(wrapper, original), self.is_on)
        ours.wrapped_by = (wrapper, *before)
        if holder:
            self.set(owner, name, ours)
        else:
            _swap(name, original, ours, within)
            self.on_undo(_swap, name, ours, original, within)

    def on_undo(self, callback: Callable[..., object], *args: Any) -> None:
        """Call ``callback`` on undo, for a change that is not an attribute."""
        self._is_on = True
        self._changes.callback(callback, *args)

    def is_on(self) -> bool:
        """Whether there is a change to undo."""
        return self._is_on

    def undo(self) -> None:
        """Put everything back; a second call does nothing."""
        self._changes.close()
        self._is_on = False


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


def _swap(name: str, old: Any, new: Any, within: str) -> None:
    """Replace old by new in every module that has it under that name."""
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", {})
        if module_name.startswith(within) and namespace.get(name) is old:
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
                value = around(getattr(owner, name), value, patches.is_on)
            patches.set_existing(owner, name, value)
        yield
    finally:
        patches.undo()


def around(original: Function, ours: Function, is_on: Callable[[], bool]) -> Any:
    """A function that calls ``ours``, with the signature of ``original``.

    A caller that keeps it after the undo, when ``is_on`` returns False, calls
    ``original`` by it.
    """

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return (ours if is_on() else original)(*args, **kwargs)

    return wrapped


def turn_into(built: Any, subclass: type) -> None:
    """Change the class of an object that Megatron made to a subclass of it.

    This is the one change that ``uninstall()`` leaves: an optimizer keeps its new
    class.
    """
    built.__class__ = subclass
