"""What triton and ptxas make of the kernels: ``cd tests && python -m figures.kernels``.

For each GPU: registers of a thread, bytes of spilled registers, and bytes of the widest load and of
the widest store in global memory. Put a triton on the path, ``PYTHONPATH=…/cores/0.19.0``, say.
``support/expected/kernels.tsv`` has what it prints with the triton that CI takes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 90, 100)
_OF = ("registers", "spilled", "load", "store")
_WIDTHS = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "b128": 16}


def resources(made: Any, capability: int) -> tuple[int, int, int, int]:
    """Registers, spilled bytes, and bytes of the widest load and store, of a compiled kernel."""
    import triton

    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    tool = ptxas / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    tool = tool if tool.exists() else ptxas / "ptxas"
    architecture = f"sm_{capability}{'a' * (capability >= 90)}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        said = subprocess.run(
            [tool, "-v", f"--gpu-name={architecture}", "-o", "/dev/null", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    widest = [_widest(made.asm["ptx"], kind) for kind in ("ld", "st")]
    return int(registers), spilled, *widest


def _widest(ptx: str, kind: str) -> int:
    found = re.findall(rf"\b{kind}\.global\S*?(?:\.v(\d))?\.(b\d+)\b", ptx)
    return max(int(count or 1) * _WIDTHS[dtype] for count, dtype in found)


def rows() -> list[list[object]]:
    """A row for each kernel and its dtypes: its name, then the numbers of each GPU."""
    from support.kernels.compiling import compiled

    table: dict[str, list[object]] = {}
    for capability in CAPABILITIES:
        for name, made in dict(compiled(capability)).items():
            table.setdefault(name, [name]).extend(resources(made, capability))
    return [table[name] for name in sorted(table)]


def table() -> str:
    """All rows as text, tabs between columns."""
    heads = [f"sm_{each} {of}" for each in CAPABILITIES for of in _OF]
    return "".join("\t".join(map(str, row)) + "\n" for row in (["kernel", *heads], *rows()))


if __name__ == "__main__":
    sys.stdout.write(table())
