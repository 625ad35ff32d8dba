"""Lines of the package and the tests, and words of the documents, against their limits.

``bash tests/run.sh --mass`` prints them. A limit is lowered when lines have gone; a new feature may
raise it by what it needs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("docs/flags.md", "docs/coefficients.md")  # not counted
LOADS = (  # what a training process imports
    "import sys, megatron_muon; megatron_muon.install(); import megatron_muon.megatron_lm.launch\n"
    "names = [name for name in sys.modules if name.split('.')[0] == 'megatron_muon']\n"
    "print(*(sys.modules[name].__file__ for name in names))"
)
LIMITS = {
    "package without lab, lines": 22_500,
    "package, lines": 32_500,
    "tests, lines": 38_000,
    "documents, words": 16_000,
    "documents, pages": 14,
    "a training process, modules": 100,
    "a training process, lines": 14_000,
}


def counted() -> dict[str, int]:
    """The counts, by the names of ``LIMITS``."""
    package = sorted((ROOT / "megatron_muon").rglob("*.py"))
    lab = ROOT / "megatron_muon" / "lab"
    pages = [path for path in (ROOT / "docs").glob("*.md") if f"docs/{path.name}" not in GENERATED]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADS],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = [Path(name) for name in done.stdout.split()]
    counts = (
        _lines(path for path in package if lab not in path.parents),
        _lines(package),
        _lines((ROOT / "tests").rglob("*.py")),
        sum(len(path.read_text().split()) for path in pages),
        len(pages),
        len(loaded),
        _lines(loaded),
    )
    return dict(zip(LIMITS, counts, strict=True))


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def main() -> int:
    """Print each count beside its limit; 1 where one is above."""
    counts = counted()
    for name, count in counts.items():
        print(f"{name:30} {count:7,} of {LIMITS[name]:7,}{' above' * (count > LIMITS[name])}")
    return int(any(count > LIMITS[name] for name, count in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
