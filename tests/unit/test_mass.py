"""What ``--mass`` counts, on texts whose counts are made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import knows, mass
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
    "text, column, count",
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


def test_only_what_is_beyond_its_bound_fails() -> None:
    assert not Measure("tokens", 100, 100).fails
    assert Measure("tokens", 101, 100).fails
    assert not Measure("words", 100, 100, is_floor=True).fails
    assert Measure("words", 99, 100, is_floor=True).fails


def test_a_size_may_grow_by_its_slack_and_no_more() -> None:
    for whole, table in mass.SIZES.items():
        size = table["tokens"]
        assert size is not None
        most = int((1 + mass.SLACK) * size)
        for tokens, failing in ((most, set()), (most + 1, {f"{whole}, tokens"})):
            sizes = dict.fromkeys(mass.SIZES, Size())
            sizes[whole] = Size(tokens=tokens)
            assert _failing(sizes) == failing


def test_a_packing_that_is_gone_fails_when_it_comes_back() -> None:
    for packing in ("starred", "chained", "packed"):
        sizes = dict.fromkeys(mass.SIZES, Size(**{packing: 30}))
        assert _failing(sizes) == {f"{whole}, {packing}" for whole in mass.SIZES}


def _failing(sizes: dict[str, Size]) -> set[str]:
    return {measure.name for measure in mass._code(sizes) if measure.fails}


def test_a_module_knows_a_feature_by_its_code_alone(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    texts = {
        "code.py": "x = config.qk_clip",
        "docstring.py": "'''qk_clip'''\nx = 1  # qk_clip",
        "lab/tool.py": "x = config.qk_clip",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    counts = knows.counts(tmp_path)
    assert counts["QK-Clip"] == 1 and counts["strips"] == 0 and counts["modules"] == 2
