"""How a replacement is recorded: a name, the reason, and what puts it in place with its undo."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

_ABSENT = object()


class MissingTargetError(RuntimeError):
    """What a replacement is for is not there: this torch or Megatron has another shape."""


@dataclass
class Patches:
    """Everything changed so far. ``undo()`` puts it back, the last change first.

    ``changed`` lists (owner, attribute, the owner's own value before), the value being ``ABSENT``
    where the owner itself had no such attribute (it was inherited, or did not exist).
    """

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
                f"{getattr(owner, '__name__', owner)} has no {name}, which megatron_muon.cpu "
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

    def on_undo(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` on undo, for a change that is not an attribute."""
        self._stack.callback(callback)

    def undo(self) -> None:
        """Put everything back."""
        self._stack.close()
        self.changed.clear()


@dataclass(frozen=True)
class Replacement:
    """One thing that stands in for the GPU. ``when`` says whether it needs Megatron imported."""

    name: str
    why: str
    apply: Callable[[Patches], None] = field(repr=False)
    when: Literal["before megatron", "after megatron"] = "before megatron"
