"""The rows of a weight that holds several projections, and how TP cuts them."""

from __future__ import annotations

import pytest

from megatron_muon.planning.sections import Rows, repeated, sectioned


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("parts", [(4, 1, 1), (2, 2, 1, 1), (8, 2, 2), (1, 1)], ids=str)
def test_tp_cuts_the_rows_of_one_rank_wherever_it_may(tp_size: int, parts: tuple[int, ...]) -> None:
    """Block by block, the rows of all TP ranks after one another are those of one rank."""
    named = tuple((str(index), count) for index, count in enumerate(parts))

    def rows(tp_size: int) -> list[tuple[int, int]]:
        sections = repeated(24 // sum(parts), named)
        _, blocks = sectioned("w", (24 // tp_size, 1), 0, tp_size, sections)
        found = []
        for local in blocks:
            assert [b.rows.start for b in local] == [0, *(b.rows.stop for b in local[:-1])]
            assert local[-1].rows.stop == 24 // tp_size
            found += [(b.matrix, b.matrix_row + i) for b in local for i in range(b.rows.size)]
        return found

    groups = 24 // sum(parts)
    whole = [(p, g * n + i) for g in range(groups) for p, n in enumerate(parts) for i in range(n)]
    assert rows(tp_size) == rows(1) == whole


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("names", [("z", "x", "dt"), ("", "", "")], ids=["apart", "one"])
def test_tp_cuts_each_section_for_itself(tp_size: int, names: tuple[str, ...]) -> None:
    """A rank holds its range of every section; a matrix has its rows in the order of one rank."""
    counts = (12, 6, 6)
    sections = tuple((Rows(name, count),) for name, count in zip(names, counts, strict=True))
    matrices, blocks = sectioned("w", (24 // tp_size, 1), 0, tp_size, sections)
    whole = [(name, row) for name, count in zip(names, counts, strict=True) for row in range(count)]
    if not names[0]:
        whole = [("", row) for row in range(24)]
    starts = [sum(counts[:index]) for index in range(3)]
    parts = [m.name.removeprefix("w").strip("[]") for m in matrices]
    for tp_rank, local in enumerate(blocks):
        held = [
            whole[start + tp_rank * count // tp_size + row]
            for start, count in zip(starts, counts, strict=True)
            for row in range(count // tp_size)
        ]
        found = [(parts[b.matrix], b.matrix_row + i) for b in local for i in range(b.rows.size)]
        assert found == held


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="w: 7 rows on each of 2 TP ranks are not the 16 of q, k"):
        sectioned("w", (7, 1), 0, 2, repeated(4, (("q", 2), ("k", 2))))
    with pytest.raises(ValueError, match="w: 2 TP ranks cannot hold equal parts of the 3 rows of"):
        sectioned("w", (4, 1), 0, 2, ((Rows("gate", 3),), (Rows("up", 5),)))
