"""The check for megatron.core, which pip installs only with the extra ``core``, and its
version; the base of this package's errors.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import sys
from pathlib import Path

# Minor versions of megatron-core, 0.x, that the plugin was tested with; 20 is main's.
Version = tuple[int, int]
OLDEST, NEWEST = (0, 12), (0, 20)
WAY_OUT = "pip install megatron-core, or put a Megatron-LM checkout on PYTHONPATH"
_NAME = "megatron.core"
# Major and minor, and whether it comes before the release MAJOR.MINOR.0, as 0.12.0rc0
# does.
_NUMBER = re.compile(
    r"(\d+)\.(\d+)((?:\.0)?[-_.]?(?:a|b|c|rc|pre|dev))?", re.IGNORECASE
)


class MuonError(Exception):
    """The base of this package's errors that a caller may want to tell from others."""


class CoreNotFoundError(MuonError, ModuleNotFoundError):
    """Python finds no megatron.core."""


class SeamError(MuonError, RuntimeError):
    """The installed Megatron is of a version that is not supported, or has another
    shape.
    """


def require_core() -> None:
    """Raise CoreNotFoundError or SeamError without a supported megatron.core; imports
    none.
    """
    there = sys.modules.get(_NAME) is not None
    # there is no package megatron either
    with contextlib.suppress(ModuleNotFoundError):
        there = there or importlib.util.find_spec(_NAME) is not None
    if not there:
        raise CoreNotFoundError(f"there is no {_NAME}: {WAY_OUT}", name=_NAME)
    text = core_version()
    if text is not None:
        check_version(text)


def check_version(text: str) -> Version:
    """The minor version of megatron-core that a version's text names, such as (0, 16).

    A release candidate counts as its minor version. Those of the oldest are not
    supported: they lack modules of the release.

    Raises:
        SeamError: this version is not supported; names it, and the way out.
    """
    number = _NUMBER.match(text)
    version = (int(number[1]), int(number[2])) if number else (0, 0)
    too_early = version == OLDEST and number is not None and number[3] is not None
    if too_early or not OLDEST <= version <= NEWEST:
        first, last = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise SeamError(
            f"megatron-core {text} is not supported: this megatron_muon was tested "
            f"with {first}.0 to {last}. Take one of those, or a megatron_muon that "
            f"supports {text}; for Megatron's own optimizers, start the script without "
            "the launcher and the patch"
        )
    return version


def core_version() -> str | None:
    """The version of megatron.core, without importing it; None where its files do not
    say it.
    """
    core = sys.modules.get(_NAME)
    if core is not None:
        text = getattr(core, "__version__", None)
        return text if isinstance(text, str) else None
    spec = importlib.util.find_spec(_NAME)
    if spec is None or spec.origin is None:
        return None
    parts = version_parts(Path(spec.origin).with_name("package_info.py"))
    if not {"MAJOR", "MINOR", "PATCH"} <= parts.keys():
        return None
    return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format(**{"PRE_RELEASE": "", **parts})


def version_parts(file: Path) -> dict[str, object]:
    """The constants of a package_info.py by name, such as MAJOR, without running it."""
    parts: dict[str, object] = {}
    with contextlib.suppress(SyntaxError, OSError):
        for node in ast.parse(file.read_bytes()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                parts |= {
                    ast.unparse(target): node.value.value for target in node.targets
                }
    return parts
