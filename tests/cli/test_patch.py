"""``megatron-muon patch``: exact round trips, on small trees and on real checkouts.

MEGATRON_LM_PATHS=/lm/0.12.3:/lm/0.16.1 (or MEGATRON_LM_PATH=/lm/0.16.1) names pristine checkouts;
only copies are changed.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from megatron_muon.lab.commands import main
from megatron_muon.lab.patch import tree as patch_tree
from megatron_muon.lab.patch.lines import PatchError, apply, parse, revert, state

FILE = "megatron/training/__init__.py"
VERSION = "megatron/core/package_info.py"
CHECKOUTS = (os.environ.get("MEGATRON_LM_PATHS") or os.environ.get("MEGATRON_LM_PATH") or "").split(
    os.pathsep
)
PATCH = patch_tree.manifest().patch
ANCHOR = PATCH.context[0]
PLAIN = b"import torch\n\nfrom .words import (one,\n" + ANCHOR + b"\n"


def tree(root: Path, data: bytes = PLAIN, version: str = "0.16.1") -> Path:
    """A checkout as far as the command looks, with text of our own."""
    major, minor, rest = version.split(".")
    number = "".join(leading_digits(rest))
    for name, content in (
        (FILE, data),
        (
            VERSION,
            f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {number}\n"
            f"PRE_RELEASE = {rest[len(number) :]!r}\nVERSION = (MAJOR, MINOR)\n".encode(),
        ),
        ("megatron/training/other.py", b"own = 1"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def leading_digits(text: str) -> str:
    return text[: len(text) - len(text.lstrip("0123456789"))]


def snapshot(root: Path) -> dict[str, tuple[int, bytes | str]]:
    """Mode and bytes of every file, targets of links; git's own folder apart."""
    entries: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(root.rglob("*")):
        if ".git" in path.relative_to(root).parts or (path.is_dir() and not path.is_symlink()):
            continue
        held = os.readlink(path) if path.is_symlink() else path.read_bytes()
        entries[str(path.relative_to(root))] = (path.lstat().st_mode, held)
    return entries


def round_trip(root: Path) -> None:
    """check, apply twice, revert twice: only the lines change, and all is as before."""
    before = snapshot(root)
    assert main(["patch", "check", str(root)]) == 3
    for _ in range(2):
        assert main(["patch", "apply", str(root)]) == 0
        assert main(["patch", "check", str(root)]) == 0
    after = snapshot(root)
    changed = {name for name in before if before[name] != after.get(name)}
    target = str((root / FILE).resolve().relative_to(root.resolve()))
    assert changed == {target} and after.keys() == before.keys()
    assert after[target][0] == before[target][0]
    for _ in range(2):
        assert main(["patch", "revert", str(root)]) == 0
        assert snapshot(root) == before


@pytest.mark.parametrize(
    "data",
    [
        PLAIN,
        PLAIN.replace(b"\n", b"\r\n"),
        PLAIN.removesuffix(b"\n"),
        PLAIN.replace(b"\n", b"\r\n").removesuffix(b"\r\n"),
        PLAIN + b"\n\nfrom .own import more\n",
        PLAIN + b"from .own import more",
        b"# \xe9 is no UTF-8\n" + PLAIN,
        ANCHOR,
        ANCHOR + b"\n" + b"a = 1\r\n",
    ],
    ids=["plain", "crlf", "no end", "crlf no end", "after", "right after", "latin", "one", "mixed"],
)
def test_round_trip_keeps_every_byte(tmp_path: Path, data: bytes) -> None:
    round_trip(tree(tmp_path, data))


def test_the_lines_get_the_ends_of_the_file() -> None:
    crlf = apply(PLAIN.replace(b"\n", b"\r\n"), PATCH)
    assert crlf.count(b"\r\n") == crlf.count(b"\n")
    assert not apply(PLAIN.removesuffix(b"\n"), PATCH).endswith(b"\n")


@pytest.mark.parametrize("mode", [0o755, 0o640, 0o444])
def test_the_mode_stays(tmp_path: Path, mode: int) -> None:
    root = tree(tmp_path)
    (root / FILE).chmod(mode)
    round_trip(root)
    assert stat.S_IMODE((root / FILE).stat().st_mode) == mode


def test_a_link_stays_one(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (root / FILE).rename(root / "megatron/training/real.py")
    (root / FILE).symlink_to("real.py")
    round_trip(root)
    linked = tmp_path / "linked"
    linked.symlink_to(root, target_is_directory=True)
    round_trip(linked)


def test_a_file_outside_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, outside = tree(tmp_path / "checkout"), tmp_path / "outside.py"
    (root / FILE).rename(outside)
    (root / FILE).symlink_to(outside)
    before = snapshot(tmp_path)
    assert main(["patch", "apply", str(root)]) == 1
    assert f"is a link to {outside}, outside of it" in capsys.readouterr().err
    assert snapshot(tmp_path) == before


def test_a_copy_that_shares_the_file_is_left_alone(tmp_path: Path) -> None:
    root = tree(tmp_path)
    os.link(root / FILE, tmp_path / "copy.py")  # as `cp -al` makes
    round_trip(root)
    assert main(["patch", "apply", str(root)]) == 0
    assert (tmp_path / "copy.py").read_bytes() == PLAIN


def test_edits_made_after_the_patch_stay(tmp_path: Path) -> None:
    root = tree(tmp_path)
    main(["patch", "apply", str(root)])
    file = root / FILE
    file.write_bytes(b"# mine\n" + file.read_bytes() + b"\nmine = 1\n")
    assert main(["patch", "revert", str(root)]) == 0
    assert file.read_bytes() == b"# mine\n" + PLAIN + b"\nmine = 1\n"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (PLAIN.replace(b")", b", mine)"), "0 times, not once"),
        (PLAIN + PLAIN, "2 times, not once"),
        (b"", "0 times, not once"),
        (PLAIN + b"import megatron_muon\n", "other lines about megatron_muon"),
        (PLAIN + b"\n".join(PATCH.added[1:]) + b"\n", "line 6, 8"),
        (apply(PLAIN, PATCH) + b"\n".join(PATCH.added), "other lines about megatron_muon"),
    ],
    ids=["own edit", "twice", "empty", "own import", "edited", "patched twice"],
)
def test_what_does_not_fit_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, why: str
) -> None:
    root = tree(tmp_path, data)
    before = snapshot(root)
    for action in ("check", "apply", "revert"):
        assert main(["patch", action, str(root)]) == 1
        error = capsys.readouterr().err
        assert why in error
        assert ("torchrun -m megatron_muon" in error) == (action != "revert")
    assert snapshot(root) == before


def test_an_unknown_version_needs_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree(tmp_path, version="0.99.0rc1")
    before = snapshot(root)
    assert main(["patch", "apply", str(root)]) == 1
    error = capsys.readouterr().err
    assert "0.99.0rc1" in error and "0.16.1" in error and "--any-version" in error
    assert snapshot(root) == before
    assert main(["patch", "check", str(root), "--any-version"]) == 3
    assert main(["patch", "apply", str(root), "--any-version"]) == 0
    assert main(["patch", "apply", str(root)]) == 0  # it is patched
    assert main(["patch", "revert", str(root)]) == 0  # whatever the version
    assert snapshot(root) == before


def test_no_checkout_and_no_version_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["patch", "apply", str(tmp_path)]) == 1
    assert "is no Megatron-LM checkout" in capsys.readouterr().err
    root = tree(tmp_path)
    (root / VERSION).write_text("__version__ = '0.16.1'\n")
    assert main(["patch", "apply", str(root)]) == 1
    assert "does not say MAJOR" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["patch", "undo", str(root)])


def test_a_write_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree(tmp_path)
    before = snapshot(root)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["patch", "apply", str(root)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert snapshot(root) == before


def test_check_tells_own_edits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "check", str(tree(tmp_path))]) == 3
    assert "with your own edits in the file" in capsys.readouterr().out  # as ours are


def test_a_patch_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="no patch of one hunk"):
        parse("--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n a\n-b\n")


def test_the_state_of_bytes() -> None:
    assert state(PLAIN, PATCH) == "not patched"
    patched = apply(PLAIN, PATCH)
    assert state(patched, PATCH) == "patched" and apply(patched, PATCH) == patched
    assert revert(PLAIN, PATCH) == PLAIN
    with pytest.raises(PatchError):
        state(patched.replace(b"        raise", b"        pass"), PATCH)


def test_the_patch_is_what_the_tools_read(tmp_path: Path) -> None:
    """``git apply`` and ``patch -p1`` make the same bytes, at the end of the file too."""
    diff = patch_tree.folder() / "megatron-training.patch"
    data = b"# a line\n" * (17 - PLAIN.count(b"\n") + 1) + PLAIN
    for command in (["git", "apply", str(diff)], ["patch", "-s", "-p1", "-i", str(diff)]):
        if shutil.which(command[0]) is None:
            pytest.skip(f"no {command[0]} here")
        root = tree(tmp_path / command[0], data)
        subprocess.run(command, cwd=root, check=True, env={**os.environ, "GIT_DIR": "none"})
        assert (root / FILE).read_bytes() == apply(data, PATCH)


# --- real checkouts --------------------------------------------------------------------------

real = pytest.mark.skipif(
    not CHECKOUTS[0], reason="MEGATRON_LM_PATHS, MEGATRON_LM_PATH name no Megatron-LM checkout"
)


def copied(checkout: str, root: Path) -> Path:
    """What the patch touches and reads, and its neighbours."""
    shutil.copytree(Path(checkout) / "megatron/training", root / "megatron/training")
    (root / "megatron/core").mkdir()
    shutil.copy2(Path(checkout) / VERSION, root / VERSION)
    return root


@real
@pytest.mark.parametrize("checkout", CHECKOUTS)
def test_a_pristine_checkout(
    tmp_path: Path, checkout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copied(checkout, tmp_path)
    main(["patch", "check", str(root)])
    assert "own edits" not in capsys.readouterr().out
    round_trip(root)


@real
@pytest.mark.parametrize("checkout", CHECKOUTS)
def test_a_checkout_with_own_edits(tmp_path: Path, checkout: str) -> None:
    root = copied(checkout, tmp_path)
    file = root / FILE
    file.write_bytes(b"# mine\n" + file.read_bytes() + b"\nfrom .mine import own\n")
    (root / "megatron/training/mine.py").write_text("own = 1")
    (root / "megatron/training/training.py").write_text("# gone\r\n")
    round_trip(root)


@real
@pytest.mark.parametrize("checkout", CHECKOUTS)
def test_git_sees_the_patch_and_then_nothing(tmp_path: Path, checkout: str) -> None:
    root = copied(checkout, tmp_path)

    def git(*words: str) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=false"]
        command = ["git", *name, *words]
        return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout

    if shutil.which("git") is None:
        pytest.skip("no git here")
    git("init", "-q", ".")
    git("add", "-A")
    git("commit", "-q", "-m", "pristine")
    main(["patch", "apply", str(root)])
    assert git("status", "--porcelain").split() == ["M", FILE]
    assert git("diff", "--numstat").split() == ["6", "0", FILE]
    main(["patch", "revert", str(root)])
    assert git("status", "--porcelain") == ""
