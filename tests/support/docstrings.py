"""Docstrings in syntax trees, and the lines that statements cover."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Those of a module, its classes and its functions: statements, with their texts."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0], text


def lines_of(statements: Iterable[ast.stmt]) -> set[int]:
    """The numbers of all lines that the statements cover."""
    covered: set[int] = set()
    for statement in statements:
        last = statement.end_lineno or statement.lineno
        covered.update(range(statement.lineno, last + 1))
    return covered
