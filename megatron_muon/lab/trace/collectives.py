"""Collectives by the names and arguments of profiler events: operation, dtype, bytes.

NCCL kernels have names such as ``ncclDevKernel_AllGather_RING_LL(...)`` and arguments
such as ``In msg nelems``. gloo's events are ``gloo:all_reduce``; the operator that
started one is ``c10d::_reduce_scatter_base_``, with the shapes of its tensors if
recorded.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from megatron_muon.console import printable
from megatron_muon.lab.trace.spans import Interval

# The longer ones first.
_OPERATIONS = """
    reduce_scatter all_reduce all_gather all_to_all broadcast send_recv barrier scatter
    gather reduce recv send coalesced
""".split()
_DTYPES = {  # as traces spell them, by short name
    "fp64": "double float64",
    "fp32": "float float32",
    "bf16": "bfloat16",
    "fp16": "half float16",
    "fp8": "float8_e4m3fn float8_e5m2",
    "bool": "bool",
    "int64": "long longint int64",
    "int32": "int int32",
    "int16": "short int16",
    "int8": "char signedchar int8",
    "uint8": "byte unsignedchar uint8",
}
_MOST = 1 << 62  # elements


@dataclass(slots=True)
class Call:
    """A collective, or the operator on the host (``c10d::``) that started one.

    ``elements`` are those of the whole buffer: an all-gather's output, a
    reduce-scatter's input. ``external`` is the number that an operator and its kernels
    share. ``place`` is the annotation that it was started in, or its group's
    description. What a trace does not tell is "" or 0.
    """

    operation: str
    at: Interval
    thread: str
    external: str
    dtype: str
    elements: float
    place: str

    @property
    def name(self) -> str:
        """Operation, dtype and place, as far as they are known."""
        return " ".join(filter(None, (self.operation, self.dtype, self.place)))

    @property
    def bytes(self) -> float:
        """Bytes of the whole buffer; NaN where the trace does not tell."""
        if not self.elements or not self.dtype:
            return math.nan
        return self.elements * int(re.sub(r"\D", "", self.dtype) or 8) / 8


def call(name: str, at: Interval, args: dict[str, Any], thread: str) -> Call:
    """The call of an event; an error for a wrong count or shape."""
    dims = args.get("Input Dims", [])
    types = args.get("Input type", [])
    if "In msg nelems" in args:
        dims = [args["In msg nelems"], args.get("Out msg nelems", 0)]
        types = [args.get("dtype")]
    elements = max(map(_elements, dims), default=0.0)
    if not 0 <= elements <= _MOST:
        raise ValueError(f"{elements} is no number of elements")
    group = str(args.get("Process Group Description", ""))
    return Call(
        # NCCL's kernels may be called Generic, or do several operations
        operation=_operation(str(args.get("Collective name", ""))) or _operation(name),
        at=at,
        thread=thread,
        external=str(args.get("External id", ""))[:40],
        dtype=next(filter(None, map(_dtype, types)), ""),
        elements=elements,
        place=printable(group[:80]),
    )


def _operation(name: str) -> str:
    plain = name[:80].split("(")[0].lower().replace("_", "")
    known = (each for each in _OPERATIONS if each.replace("_", "") in plain)
    return next(known, "")


def _dtype(text: object) -> str:
    """Short name of ``BFloat16``, ``c10::Half``, ``long int``; "" where it is
    unknown.
    """
    plain = str(text)[:40].split("::")[-1].replace(" ", "").lower()
    known = (short for short, names in _DTYPES.items() if plain in names.split())
    return next(known, "")


def _elements(dims: Any) -> float:
    """Elements of a tensor of this shape, or of a list of tensors."""
    if not isinstance(dims, list):
        return float(dims)
    parts = map(_elements, dims)
    is_list = bool(dims) and isinstance(dims[0], list)
    return sum(parts) if is_list else math.prod(parts)
