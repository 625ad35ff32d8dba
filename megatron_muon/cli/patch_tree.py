"""The patch in a Megatron-LM checkout: finding the release, and writing the one patched file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import megatron_muon
from megatron_muon.cli import patch_lines
from megatron_muon.cli.patch_lines import Addition, PatchError, State
from megatron_muon.presence import version_parts

_VERSION_FILE = "megatron/core/package_info.py"


@dataclass(frozen=True, slots=True)
class Release:
    """A Megatron-LM that the patch was tried on.

    Attributes:
        name: the release's tag, or ``main``.
        version: ``megatron.core.__version__``, which can differ from the tag.
        sha256: hash of the unpatched file that the patch changes, in hexadecimal digits.
    """

    name: str
    version: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """``patches/manifest.json`` and the patch that it names."""

    patch: Addition
    releases: tuple[Release, ...]


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout that is patched or can be.

    Attributes:
        state: whether it has the patch's lines.
        version: version of its megatron.core.
        releases: names of the releases of that version; empty where the manifest has none.
        edited: whether the file, without the patch's lines, differs from those releases'.
    """

    state: State
    version: str
    releases: tuple[str, ...]
    edited: bool


def folder() -> Path:
    """The folder of the patches: in the installed package, or beside it in a clone.

    Raises:
        FileNotFoundError: neither has patches.
    """
    package = Path(megatron_muon.__file__).parent
    for candidate in (package / "patches", package.parent / "patches"):
        if (candidate / "manifest.json").is_file():
            return candidate
    raise FileNotFoundError(
        f"this megatron_muon, in {package}, was installed without its patches: install it again "
        "from a clone or a wheel"
    )


@cache
def manifest() -> Manifest:
    """The manifest and the patch in ``folder()``."""
    where = folder()
    table = json.loads((where / "manifest.json").read_text())
    patch = patch_lines.parse((where / table["patch"]).read_text())
    assert patch.file == table["file"]
    rows = [Release(row["release"], row["version"], row["sha256"]) for row in table["versions"]]
    return Manifest(patch, tuple(rows))


def version_of(checkout: Path) -> str:
    """``megatron.core.__version__`` of a checkout, read without running any of it.

    Raises:
        PatchError: the folder is no checkout, or does not say its version as expected.
    """
    for needed in (_VERSION_FILE, manifest().patch.file):
        if not (checkout / needed).is_file():
            raise PatchError(
                f"{checkout} is no Megatron-LM checkout, it has no {needed}: give the folder that "
                "pretrain_gpt.py is in"
            )
    try:
        parts = version_parts(checkout / _VERSION_FILE)
        return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format_map(parts)
    except KeyError as error:
        raise PatchError(f"{checkout / _VERSION_FILE} does not say {error.args[0]}") from None


def look(checkout: Path, *, any_version: bool = False) -> Checkout:
    """Whether a checkout is patched or can be.

    Args:
        checkout: the folder that has ``megatron/training``.
        any_version: accept versions that are not in the manifest, too.

    Raises:
        PatchError: it is not patched and cannot be; says why.
    """
    version = version_of(checkout)
    patch, releases = manifest().patch, manifest().releases
    same = [release for release in releases if release.version == version]
    data = _target(checkout).read_bytes()
    state = patch_lines.state(data, patch)
    if not same and not any_version and state == "not patched":
        raise PatchError(
            f"{checkout} is megatron-core {version}, and the patch was tried on "
            f"{', '.join(release.version for release in releases)} only: check out one of these, "
            "or give --any-version, which asks only that the place in the file is the same"
        )
    pristine = hashlib.sha256(patch_lines.revert(data, patch)).hexdigest()
    edited = pristine not in {release.sha256 for release in same}
    return Checkout(state, version, tuple(release.name for release in same), edited)


def apply(checkout: Path, *, any_version: bool = False) -> bool:
    """Put the patch in; False where it was in already.

    Raises:
        PatchError: the checkout cannot be patched; nothing is changed.
        OSError: the file cannot be read or written; nothing is changed.
    """
    look(checkout, any_version=any_version)
    return _rewrite(checkout, patch_lines.apply)


def revert(checkout: Path) -> bool:
    """Take the patch out, whatever the version; False where it was not in.

    Raises:
        PatchError: see ``apply``.
        OSError: see ``apply``.
    """
    version_of(checkout)
    return _rewrite(checkout, patch_lines.revert)


def _rewrite(checkout: Path, change: Callable[[bytes, Addition], bytes]) -> bool:
    target = _target(checkout)
    before = target.read_bytes()
    after = change(before, manifest().patch)
    if after == before:
        return False
    _replace(target, after)
    return True


def _target(checkout: Path) -> Path:
    """The file to patch, with links resolved; never one outside the checkout."""
    target = (checkout / manifest().patch.file).resolve()
    if checkout.resolve() not in target.parents:
        raise PatchError(
            f"{manifest().patch.file} of {checkout} is a link to {target}, outside of it: give the "
            "checkout that it belongs to"
        )
    return target


def _replace(target: Path, data: bytes) -> None:
    """Replace a file's contents atomically, and keep its mode and owner."""
    before = target.stat()
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(PermissionError):  # only root may give a file away
            os.chown(name, before.st_uid, before.st_gid)
        os.chmod(name, before.st_mode & 0o7777)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
