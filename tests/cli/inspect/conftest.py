"""Checkpoints of two formats: one that nobody has touched, and a copy that may be
changed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.checkpoints.inspecting import DEFAULT, as_megatron_lm, saved, seal

FORMATS = [DEFAULT, "torch"]


@pytest.fixture(scope="session", params=FORMATS)
def whole_one(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint that nobody has touched."""
    folder = tmp_path_factory.mktemp("whole") / "iter_0000003"
    folder.mkdir()
    saved(folder, request.param)
    as_megatron_lm(folder)
    return folder


@pytest.fixture
def folder(whole_one: Path, tmp_path: Path) -> Path:
    """A copy that may be changed; it has no digest."""
    return Path(shutil.copytree(whole_one, tmp_path / whole_one.name))


@pytest.fixture
def sealed(folder: Path) -> Path:
    """The same with a digest."""
    seal(folder)
    return folder
