"""``python -O`` leaves asserts out: none may do anything, and nothing may rest on
one.
"""

from __future__ import annotations

import ast
from pathlib import Path

from support import ROOT

FILES = [
    *sorted((ROOT / "megatron_muon").rglob("*.py")),
    *sorted((ROOT / "examples").rglob("*.py")),
]
# Functions and methods that change nothing and are cheap.
PURE = set("len isinstance callable set all any sorted values keys".split())


def impure(path: Path) -> list[str]:
    """The asserts whose condition calls another function, or binds a name."""
    named = []
    for node in ast.walk(ast.parse(path.read_text())):
        for inside in ast.walk(node.test) if isinstance(node, ast.Assert) else ():
            binds = isinstance(
                inside, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
            )
            if binds or (isinstance(inside, ast.Call) and _called(inside) not in PURE):
                named.append(ast.unparse(node))
    return named


def _called(call: ast.Call) -> str:
    return (
        call.func.attr
        if isinstance(call.func, ast.Attribute)
        else ast.unparse(call.func)
    )


def test_no_assert_has_a_side_effect() -> None:
    assert {path: faults for path in FILES if (faults := impure(path))} == {}
