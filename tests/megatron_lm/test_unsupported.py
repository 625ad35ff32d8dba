"""A Megatron of a version that is not supported: refused by its number wherever a run
enters.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron_muon.presence import SeamError, check_version
from support import ROOT, written
from support.processes import python

UNSUPPORTED = ("0.11.0", "0.12.0rc0", "0.21.0")
# Each way into the plugin, in one process, for one version after the other.
ENTRIES = """
import contextlib, io, json, sys
from pathlib import Path
import megatron_muon
from megatron_muon.lab.commands import main
from megatron_muon.megatron_lm import launch

def said(enter):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            end = enter()
        except BaseException as error:
            end = f"{type(error).__name__}: {error}"
    return f"{out.getvalue()}{end}"

root, *versions = sys.argv[1:]
for version in versions:
    Path(root, "megatron/core/package_info.py").write_text(version)
    preset = "--model llama3-8b --world-size 8".split()
    commands = {"plan": preset, "routes": preset, "doctor": []}
    texts = {
        name: said(lambda: main([name, *words]))
        for name, words in commands.items()
    }
    texts["launcher"] = said(lambda: launch.main([f"{root}/pretrain_gpt.py"]))
    texts["install"] = said(megatron_muon.install)
    texts["cpu"] = said(megatron_muon.cpu.enable)
    print(json.dumps(texts))
"""


# As a Megatron of another shape: neither of the functions is where it was.
OTHER_SHAPE = """
import sys
sys.argv = ["script", "--optimizer", "adam"]
import megatron.core, megatron.training
from megatron_muon.megatron_lm import autoload
for words in (["--optimizer", "muon"], ["--optimizer=muon"]):
    sys.argv = ["script", *words]
    try:
        print("trains", autoload._install())
    except RuntimeError as error:
        print("refused", error)
"""


def package_info(version: str) -> str:
    head, candidate, number = version.partition("rc")
    major, minor, patch = head.split(".")
    pre = f"PRE_RELEASE = {candidate + number!r}\n"
    return f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\n{pre}"


def checkout(root: Path, core: str) -> Path:
    """A checkout, as far as a refused run gets."""
    training = "from . import arguments\nimport megatron_muon.autoload\n"
    files = {
        "megatron/core/__init__.py": core,
        "megatron/training/__init__.py": training,
        "megatron/training/arguments.py": "",
        "pretrain_gpt.py": "print('the script was run')\n",
    }
    return written(root, files)


def entered(root: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return python(
        "-W", "error", "-c", code, *words, PYTHONPATH=f"{root}{os.pathsep}{ROOT}"
    )


def test_every_way_in_refuses_it_by_its_number_before_it_is_imported(
    tmp_path: Path,
) -> None:
    root = checkout(tmp_path, "raise ImportError('imported')")
    done = entered(root, ENTRIES, str(root), *map(package_info, UNSUPPORTED))
    for version, line in zip(UNSUPPORTED, done.stdout.splitlines(), strict=True):
        texts = json.loads(line)
        assert len(texts) == 6
        for name, said in texts.items():
            text = " ".join(said.split())  # doctor wraps it, by the length of a path
            assert f"megatron-core {version} is not supported: " in text, (name, text)
            assert "Take one of those, or a megatron_muon that supports" in text
            assert "the script was run" not in text and "cannot be imported" not in text
        assert (
            "patch apply" not in texts["doctor"]
            and "use the launcher" not in texts["doctor"]
        )


def test_a_patched_checkout_of_any_shape_stops_muon(tmp_path: Path) -> None:
    done = entered(checkout(tmp_path, "__version__ = '0.12.0rc0'"), OTHER_SHAPE)
    refused = [
        line for line in done.stdout.splitlines() if "no --optimizer muon" not in line
    ]
    assert len(refused) == 2, done.stderr
    assert all(
        line.startswith("refused megatron-core 0.12.0rc0 is not") for line in refused
    )


@pytest.mark.parametrize(
    "text, minor",
    [
        ("0.12.0", 12),
        ("0.12.0+ab12", 12),
        ("0.12.1rc0", 12),
        ("0.16.0rc0", 16),
        ("0.20.0b1", 20),
    ],
)
def test_a_release_candidate_counts_as_its_minor_version(text: str, minor: int) -> None:
    assert check_version(text) == (0, minor)


@pytest.mark.parametrize(
    "text", [*UNSUPPORTED, "0.12rc1", "0.12.0.dev3", "1.0.0", "unknown", ""]
)
def test_another_version_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(SeamError, match=f"megatron-core {text} is not supported"):
        check_version(text)
