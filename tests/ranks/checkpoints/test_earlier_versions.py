"""Checkpoints of earlier versions load in every format: weights, main parameters,
momentum and moments bit for bit. The versions are taken from git's history.
"""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.mcore.checkpoint import manifest
from support import ROOT
from support.checkpoints.saving import formats
from support.checkpoints.sealing import loaded
from support.marks import in_each_format
from support.models.gpt import Case, Topology, on_ranks
from support.processes import environment, succeeded
from support.ranks import run
from support.runs.topologies import DP2, DP2_EP2, TP2
from support.runs.whole import differences, whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
COMMITS = {"0.2.0": "cf5addc7", "before 0.3.0": "5e0cf2a3"}
# by name: what is trained, on which ranks; 0.2.0 has no other rules than muon
CASES: dict[str, tuple[Case, Topology]] = {
    "dense": (Case(steps=2), DP2),
    "experts": (Case(steps=2, moe=True), DP2_EP2),
    "cut": (Case(steps=2, gated=True, tied=True), TP2),
    "normuon": (Case(steps=2).with_muon(rule="normuon"), DP2),
    "routed": (Case(steps=2).with_muon(muon_exclude=("*.linear_fc1.weight",)), DP2),
}
SAVES = """
import pickle, sys
from megatron_muon import MuonConfig
from support.checkpoints.saving import formats
from support.checkpoints.sealing import saved
from support.models.gpt import Case, Topology
from support.ranks import run

folder, cases = sys.argv[1], pickle.loads(bytes.fromhex(sys.argv[2]))
for name, (case, topology) in cases.items():
    case, topology = Case(**case), Topology(**topology)
    if not all(hasattr(MuonConfig(), field) for field, _ in case.muon):
        continue
    for format in formats():
        to = f"{folder}/{name}/{format}"
        held = run(saved, topology.world_size, case, topology, format, to, timeout=300)
        with open(f"{to}.held", "wb") as file:
            pickle.dump(held, file)
"""


def _given(made: Case | Topology) -> dict[str, Any]:
    """The fields of a dataclass that are not its defaults."""
    default = vars(type(made)())
    return {name: v for name, v in vars(made).items() if v != default[name]}


@pytest.fixture(scope="module", params=COMMITS)
def saves(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder in which an earlier version has saved each case in each format."""
    commit = COMMITS[request.param]
    git = ["git", "-C", str(ROOT)]
    archive = subprocess.run([*git, "archive", commit], capture_output=True)
    if archive.returncode:
        pytest.skip(f"git's history has no {commit}")
    tree = tmp_path_factory.mktemp("tree")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tree, filter="data")
    folder = tmp_path_factory.mktemp("saves")
    plain = {name: (_given(one), _given(two)) for name, (one, two) in CASES.items()}
    for name in CASES:
        for format in formats():
            (folder / name / format).mkdir(parents=True)
    command = sys.executable, "-c", SAVES, folder, pickle.dumps(plain).hex()
    tests = tree / "tests"
    succeeded(*command, cwd=tests, env=environment(tree, tests))
    return folder


@in_each_format
@pytest.mark.parametrize("name", CASES)
def test_it_loads_bit_for_bit(name: str, format: str, saves: Path) -> None:
    case, topology = CASES[name]
    folder = saves / name / format
    if not (kept := folder.parent / f"{format}.held").exists():
        pytest.skip("it has no such setting")
    held: list[Any] = pickle.loads(kept.read_bytes())
    there = manifest.read(folder)
    assert there is not None and there["complete"] and there["format"] == 2
    results = on_ranks(loaded, case, topology, format, str(folder), timeout=300)
    assert [result["error"] for result in results] == [None] * topology.world_size
    again = [result["held"] for result in results]
    assert differences(whole(held), whole(again)) == []
    assert all(shards["shards"] for shards in again)


def test_a_damaged_one_is_refused(saves: Path) -> None:
    """Last, since it changes a file."""
    case, topology = CASES["dense"]
    format = formats()[0]
    folder = saves / "dense" / format
    file = max(folder.glob("__*.distcp"))  # core 0.12 has rank 0 write this format
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for result in run(loaded, 2, case, topology, format, str(folder)):
        assert f"{file.name} is damaged" in (result["error"] or "")
