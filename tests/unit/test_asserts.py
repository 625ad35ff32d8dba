"""``python -O`` leaves asserts out: none may do anything, and nothing may rest on one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

FILES = [
    *sorted((ROOT / "megatron_muon").rglob("*.py")),
    *sorted((ROOT / "examples").rglob("*.py")),
]
# Functions and methods that change nothing and are cheap.
PURE = {"len", "isinstance", "callable", "set", "all", "any", "sorted", "values", "keys"}


def impure(source: str) -> list[str]:
    """The asserts whose condition calls another function, or binds a name."""
    named = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assert):
            continue
        for inside in ast.walk(node.test):
            binds = isinstance(inside, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))
            if binds or (isinstance(inside, ast.Call) and _called(inside) not in PURE):
                named.append(ast.unparse(node))
    return named


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_assert_has_a_side_effect(path: Path) -> None:
    assert impure(path.read_text()) == []


@pytest.mark.parametrize(
    "source", ["assert stack.pop() == 1", "assert (n := 2)", "assert check(x), 'text'"]
)
def test_the_search_for_side_effects_sees_them(source: str) -> None:
    assert impure(source) == [ast.unparse(ast.parse(source))]


def test_no_condition_on_what_a_user_gives_is_an_assert() -> None:
    """In the command line's modules an assert is about None or a type, for the type checker."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert) and {"cli", "training"} & set(path.parts):
                names = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
                assert names.isdisjoint({"args", "flags", "given", "argv", "options"}), path


PARTS = """
import json, torch
from megatron_muon.bench.step.meter import StepTimers
watch = StepTimers(torch.device("cpu"))
insides = []
def step():
    with watch.part("muon-gather"):
        insides.append(watch.inside)
    insides.append(watch.inside)
times = watch.measure(step)
print(json.dumps([__debug__, sorted(times.parts_ms), insides, watch.inside]))
"""


@pytest.mark.parametrize("options", [[], ["-O"]], ids=["debug", "-O"])
def test_parts_of_a_step_end_with_and_without_asserts(options: list[str]) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, *options, "-c", PARTS],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    debug = "true" if not options else "false"
    inside = '["muon-gather", "rest"]'
    assert done.stdout.strip() == f'[{debug}, ["muon-gather", "rest"], {inside}, null]'
