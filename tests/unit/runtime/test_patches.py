"""Whatever is put on someone else's module, class or object leaves what was there before."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_muon.runtime.patches import Patches, around, replaced
from support import ROOT


class Base:
    def step(self) -> str:
        return "theirs"


def _module() -> Any:
    return SimpleNamespace(step=lambda: "theirs")


def _wrapped_object() -> Any:
    """One whose step a script has wrapped, as a script does with an optimizer's."""
    optimizer = Base()
    optimizer.step = lambda: "theirs"  # type: ignore[method-assign]
    return optimizer


@contextmanager
def _within(owner: Any, ours: Callable[..., str]) -> Iterator[None]:
    with replaced(owner, step=ours):
        yield


@contextmanager
def _until_undo(owner: Any, ours: Callable[..., str]) -> Iterator[None]:
    patches = Patches()
    original = owner.step
    wrapped = around(original, lambda _, *args: ours(*args), patches.is_on)
    patches.set(owner, "step", wrapped)
    yield
    patches.undo()


@pytest.mark.parametrize("put_on", [_within, _until_undo])
@pytest.mark.parametrize(
    "make",
    [_module, _wrapped_object, Base, lambda: type("Owner", (Base,), {}), lambda: Base],
    ids=["module", "object with its own", "object of a class", "subclass", "class"],
)
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["", "wrapped in between"])
def test_what_was_there_before_is_there_afterwards(
    put_on: Any, make: Callable[[], Any], is_wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = make()
    before = dict(vars(owner))

    def call() -> str:
        return (owner() if isinstance(owner, type) else owner).step()

    with put_on(owner, lambda *args: "ours"):
        assert call() == "ours"
        if is_wrapped:
            ours = owner.step
            monkeypatch.setattr(owner, "step", lambda *args: f"a script's, then {ours(*args)}")
            assert call() == "a script's, then ours"
    if is_wrapped:
        assert call() == "a script's, then theirs"
    else:
        assert dict(vars(owner)) == before and call() == "theirs"


def test_no_attribute_is_deleted_but_by_patches() -> None:
    """``del optimizer.step`` would take a script's own wrapper away."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "megatron_muon").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Delete)
        and any(isinstance(target, ast.Attribute) for target in node.targets)
    ]
    assert found == []
