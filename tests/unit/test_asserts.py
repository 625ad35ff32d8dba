"""``python -O`` leaves asserts out: none may do anything, and nothing may rest on one."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from support import ROOT

FILES = [
    *sorted((ROOT / "megatron_muon").rglob("*.py")),
    *sorted((ROOT / "examples").rglob("*.py")),
]
# Functions and methods that change nothing and are cheap.
PURE = {"len", "isinstance", "callable", "set", "all", "any", "sorted", "values", "keys"}


@cache
def asserts(path: Path) -> list[ast.Assert]:
    """The asserts in a file."""
    return asserts_in(path.read_text())


def asserts_in(source: str) -> list[ast.Assert]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]


def impure(nodes: list[ast.Assert]) -> list[str]:
    """Those whose condition calls another function, or binds a name."""
    named = []
    for node in nodes:
        for inside in ast.walk(node.test):
            binds = isinstance(inside, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))
            if binds or (isinstance(inside, ast.Call) and _called(inside) not in PURE):
                named.append(ast.unparse(node))
    return named


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


def test_no_assert_has_a_side_effect() -> None:
    assert {path: faults for path in FILES if (faults := impure(asserts(path)))} == {}


@pytest.mark.parametrize(
    "source", ["assert stack.pop() == 1", "assert (n := 2)", "assert check(x), 'text'"]
)
def test_the_search_for_side_effects_sees_them(source: str) -> None:
    assert impure(asserts_in(source)) == [ast.unparse(ast.parse(source))]
