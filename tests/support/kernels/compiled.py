"""What triton compiles a kernel to, without a GPU: its PTX, and its result in the
interpreter.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache

import pytest

from support.processes import printed

CAPABILITIES = (80, 90, 100)


def interpreted(module: str) -> int:
    """Run a module in triton's interpreter; the number of cases that it says agree.

    In a process of its own, since triton reads the variable when a kernel is defined.
    """
    pytest.importorskip("triton", reason="the kernels are triton's")
    text = printed("-m", module, TRITON_INTERPRET="1")
    said = re.search(r"^(\d+) cases agree$", text, re.M)
    assert said, text
    return int(said[1])


@cache
def instructions(capability: int) -> dict[str, Counter[str]]:
    """Instructions in PTX of each launch that a run can have, by its kernel and
    dtypes.
    """
    pytest.importorskip("triton", reason="the kernels are triton's")
    text = printed("-m", "support.kernels.compiling", "--instructions", str(capability))
    return {name: Counter(found) for name, found in json.loads(text).items()}
