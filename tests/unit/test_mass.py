"""What ``--mass`` counts, on texts whose counts are made by hand."""

from __future__ import annotations

import pytest

from support import mass
from support.mass import Measure, Size, size_of

ONE_OF_EACH = '''"""Two words."""
import os

def function(a, b):
    """Three more words."""
    # no token
    x, y = g(a), g(b)
    return x if a else y if b else [*(1, 2)]

pairs = {**{"a": 1}}
both = [u for u in a for v in u]
'''
LONG = "def function():\n" + 14 * "    x = 1\n"  # nodes: 1 + 14 x 3, on 15 lines


def test_a_text_with_one_of_each() -> None:
    """5 statements; tokens of the lines 8, 13, 17, 10 and 13."""
    assert size_of(ONE_OF_EACH) == Size(
        statements=5,
        tokens=61,
        doc_words=5,
        starred=2,
        chained=1,
        packed=1,
        two_for=1,
        dense=0,
    )


@pytest.mark.parametrize(
    ("text", "column", "count"),
    [
        ("x = [*(1, 2), *[3]]", "starred", 2),
        ("x = f(*(1, 2))", "starred", 0),  # no display
        ("x = [*y, *z]", "starred", 0),
        ("x = {**y}", "starred", 0),
        ("x = 1 if a else 2", "chained", 0),
        ("x = 1 if (2 if a else b) else 3", "chained", 0),  # in its condition
        ("x = (1 if a else 2) if b else 3", "chained", 1),
        ("a, b = pair()", "packed", 0),
        ("a, b = f(), 1", "packed", 0),
        ("a, b = [f(x)], [y for y in z]", "packed", 1),
        ("pair = f(), g()", "packed", 0),
        ("x = [[u for u in v] for v in w]", "two_for", 0),
        ("x = {u: v for u in a for v in u}", "two_for", 1),
        ("x = {u for u in a if u for v in u}", "two_for", 1),
        (LONG, "dense", 3),
        (LONG.replace("    x = 1\n", "", 1), "dense", 0),  # 14 lines
        ("'''Words of the module.'''\n'''not these'''", "doc_words", 4),
        ("class A:\n    '''Two words.'''\n    x = 1", "statements", 2),
    ],
)
def test_each_rule(text: str, column: str, count: int) -> None:
    assert getattr(size_of(text), column) == count


def test_where_lines_are_broken_counts_nothing() -> None:
    broken = ONE_OF_EACH.replace("g(a), g(b)", "(\n        g(a),\n        g(b)\n    )")
    one = ONE_OF_EACH.replace("g(a), g(b)", "(g(a), g(b))")
    assert size_of(broken) == size_of(one)


def test_a_sum_has_the_largest_density() -> None:
    total = Size(statements=1, dense=3) + Size(statements=2, dense=2)
    assert total == Size(statements=3, dense=3)


def test_only_what_is_beyond_the_slack_fails() -> None:
    assert not Measure("tokens", 105, 100).fails
    assert Measure("tokens", 106, 100).fails
    assert not Measure("words", 95, 100, is_floor=True).fails
    assert Measure("words", 94, 100, is_floor=True).fails
    assert Measure("chained", 1, 0).fails


def test_a_packing_that_is_gone_fails_when_it_comes_back() -> None:
    sizes = dict.fromkeys(mass.GOALS, Size(statements=10, tokens=90))
    assert not any(measure.fails for measure in mass._of_code(sizes))
    for packing in ("starred", "chained", "packed"):
        of_many = Size(statements=10, tokens=90, **{packing: 30})
        sizes = dict.fromkeys(mass.GOALS, of_many)
        failing = {measure.name for measure in mass._of_code(sizes) if measure.fails}
        assert failing == {f"{whole}, {packing}" for whole in mass.GOALS}
