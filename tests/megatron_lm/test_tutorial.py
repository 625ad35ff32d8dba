"""examples/tutorial: the notebook runs, and prints what it has printed."""

from __future__ import annotations

import json
import re

import pytest

from support import ROOT
from support.processes import environment

FOLDER = ROOT / "examples" / "tutorial"
NOTEBOOK = FOLDER / "one_step.ipynb"
_NUMBER = re.compile(r"-?\d+\.\d*|-?\d+")


def printed(cells: list[dict]) -> list[str]:
    """What each cell of code printed; its errors are not in it."""
    return [
        "".join(
            "".join(output["text"])
            for output in cell["outputs"]
            if output.get("name") == "stdout"
        )
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def words(text: str) -> str:
    """The text without its numbers, and without the spaces that align them."""
    return " ".join(_NUMBER.sub("#", text).replace("[ ", "[").split())


def apart(one: str, two: str) -> bool:
    """Whole numbers are equal; others may differ as bf16 products of two CPUs do
    (2^-8).
    """
    if "." not in one:
        return one != two
    return abs(float(one) - float(two)) > 2e-3 + 0.02 * abs(float(one))


def test_the_notebook_prints_what_it_has_printed() -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    committed = json.loads(NOTEBOOK.read_text())["cells"]
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook,
        timeout=240,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute(env=environment())
    before = printed(committed)
    now = printed(notebook.cells)
    assert [words(text) for text in now] == [words(text) for text in before]
    for old, new in zip(before, now, strict=True):
        pairs = zip(_NUMBER.findall(old), _NUMBER.findall(new), strict=True)
        assert [pair for pair in pairs if apart(*pair)] == []
    assert any("all weights of all ranks are the same: True" in text for text in now)
