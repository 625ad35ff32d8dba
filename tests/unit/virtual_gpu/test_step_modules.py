"""What runs in one step is few modules, which a reader finds in the documents."""

from __future__ import annotations

from support.virtual_gpu.step_modules import lines_of, listed, that_run

MOST_MODULES, MOST_LINES = 34, 6_300


def test_the_documents_list_the_modules_of_a_step() -> None:
    assert set(listed()) == that_run()
    assert len(listed()) == len(set(listed())) <= MOST_MODULES


def test_they_are_read_in_an_afternoon() -> None:
    assert sum(map(lines_of, listed())) <= MOST_LINES
