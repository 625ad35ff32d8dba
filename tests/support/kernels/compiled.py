"""What triton makes of a kernel, without a GPU: its PTX, and its result in the interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from support import ROOT, TESTS

CAPABILITIES = (80, 90, 100)


def interpreted(module: str) -> int:
    """Run a module in triton's interpreter; the number of cases that it says agree.

    In a process of its own, since triton reads the variable when a kernel is defined.
    """
    pytest.importorskip("triton", reason="the kernels are triton's")
    path = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=TESTS,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = re.search(r"^(\d+) cases agree$", done.stdout, re.M)
    assert said, done.stdout
    return int(said[1])


def instructions(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    capability: int,
    divisible: tuple[str, ...] = (),
) -> Counter[str]:
    """Instructions of a kernel in PTX, by name."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    source = ASTSource(
        fn=kernel,
        signature=dict(signature) | dict.fromkeys(constants, "constexpr"),
        constexprs=dict(constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options=dict(options))
    assert "cubin" in made.asm  # ptxas takes it
    found = re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]+)\s", made.asm["ptx"], re.M)
    return Counter(found)
