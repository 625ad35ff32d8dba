"""The one way in which this package replaces what is not its own: recorded, and undone in reverse.

``Patches`` sets everything that is set in Megatron or torch, for a run or within a ``with``. So
``undo()`` leaves every module and class with the very objects that it had.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

_ABSENT = object()


class MissingTargetError(RuntimeError):
    """A symbol to replace is not there: this torch or Megatron has another shape."""


@dataclass
class Patches:
    """Everything changed so far. ``undo()`` puts it back, the last change first.

    ``changed`` lists (owner, attribute, the owner's own value before), the value being ``ABSENT``
    where the owner itself had no such attribute (it was inherited, or did not exist).

    Attributes:
        by: which part of this package replaces it, for errors.
    """

    by: str = "megatron_muon"
    ABSENT = _ABSENT
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
                "replaces: this version of it is not known here; use one that the README lists"
            )
        self.add(owner, name, value)

    def add(self, owner: Any, name: str, value: Any) -> None:
        """``set`` that also makes an attribute which is not there."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self.changed.append((owner, name, before))
        if before is _ABSENT:
            self._stack.callback(delattr, owner, name)
        else:
            self._stack.callback(setattr, owner, name, before)

    def set_existing(self, owner: Any, name: str, value: Any) -> None:
        """``set`` where this version has the attribute, nothing otherwise.

        Only for what some versions are known to lack because they do not need it.
        """
        if hasattr(owner, name):
            self.set(owner, name, value)

    def everywhere(self, name: str, old: Any, new: Any, within: str = "") -> None:
        """Replace ``old`` in every module that has it under ``name``, by import too.

        On undo every module that has ``new`` then gets ``old``: also one that imported ``new``
        meanwhile. Where it goes by another name it is not found, and ``new`` must pass the call on.

        Args:
            name: the name that the modules have it under.
            old, new: the object and its replacement.
            within: the modules' names begin with this.
        """
        _swap(name, old, new, within)
        self._stack.callback(_swap, name, new, old, within)

    def on_undo(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` on undo, for a change that is not an attribute."""
        self._stack.callback(callback)

    def undo(self) -> None:
        """Put everything back. Twice is once."""
        self._stack.close()
        self.changed.clear()


def _swap(name: str, old: Any, new: Any, within: str) -> None:
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", {})
        if module_name.startswith(within) and namespace.get(name) is old:
            namespace[name] = new


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within it a module or class has these in place of those of its attributes that it has."""
    patches = Patches()
    try:
        for name, value in attributes.items():
            patches.set_existing(owner, name, value)
        yield
    finally:
        patches.undo()


def around(
    original: Callable[..., Any], wrapper: Callable[..., Any], is_on: Callable[[], bool]
) -> Any:
    """A function in the place of ``original`` that calls ``wrapper(original, ...)``.

    It has the signature of ``original``. A caller that keeps it beyond the undo gets ``original``.

    Args:
        original: the function to wrap.
        wrapper: takes ``original``, then what that takes.
        is_on: False once the wrapping is undone.
    """

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not is_on():
            return original(*args, **kwargs)
        return wrapper(original, *args, **kwargs)

    return wrapped


def turn_into(built: Any, subclass: type) -> None:
    """Give an object that is built already another class: its methods are that class's from now on.

    The one change that ``uninstall()`` leaves: a built optimizer goes on as what it has become.

    Args:
        built: whatever Megatron has made.
        subclass: a subclass of the class that Megatron made it of.
    """
    built.__class__ = subclass
