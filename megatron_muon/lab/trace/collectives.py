"""Collectives by the names and arguments of profiler events: operation, bytes, group.

NCCL kernels have names such as ``ncclDevKernel_AllGather_RING_LL(...)`` and, from torch
2.2 on, arguments such as ``In msg nelems``. gloo's events are ``gloo:all_reduce``; the
operator that started one is ``c10d::_reduce_scatter_base_``, with the shapes of its
tensors if recorded.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from megatron_muon.console import printable
from megatron_muon.lab.trace.spans import Interval

COMMS = "record_param_comms"  # torch's event about a collective of any backend
# The longer ones first.
_OPERATIONS = """
    reduce_scatter all_reduce all_gather all_to_all broadcast send_recv barrier scatter
    gather reduce recv send
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
    description. What a trace does not tell is "", 0 or None.
    """

    operation: str
    start: float
    stop: float
    thread: str
    is_operator: bool
    external: int
    dtype: str
    elements: int | None
    ranks: int
    group: str
    place: str = ""

    def learn(self, launch: Call | None) -> None:
        """Take from the operator that started it what the event itself does not
        tell.
        """
        if launch is not None:
            if self.operation in ("nccl", "send_recv"):
                self.operation = launch.operation or self.operation
            self.dtype = self.dtype or launch.dtype
            if launch.elements is not None:
                # gloo's own event has a rank's part only
                self.elements = max(self.elements or 0, launch.elements)
            self.ranks = self.ranks or launch.ranks
            self.group = self.group or launch.group
            self.place = launch.place
        self.place = self.place or self.group

    @property
    def bytes(self) -> float:
        """Bytes of the whole buffer; NaN where the trace does not tell."""
        if self.elements is None or not self.dtype:
            return math.nan
        return self.elements * int(re.sub(r"\D", "", self.dtype) or 8) / 8

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends in a ring, as nccl-tests counts them; NaN if unknown.

        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        """
        if self.operation in ("send", "recv", "send_recv", "broadcast", "reduce"):
            return self.bytes
        share = (self.ranks - 1) / self.ranks if self.ranks else math.nan
        return self.bytes * share * (2 if self.operation == "all_reduce" else 1)


def call(name: str, at: Interval, args: dict[str, Any], thread: str) -> Call:
    """The call of an event, without other arguments; a ValueError for a wrong count or
    shape.
    """
    # NCCL's kernels may be called Generic, or do several operations
    operation = _operation(str(args.get("Collective name", ""))) or _operation(name)
    operation = operation or _without_operation(name)
    dims = args.get("Input Dims")
    shapes = [_elements(shape) for shape in dims] if isinstance(dims, list) else []
    elements = max(shapes, default=None)
    types = args.get("Input type")
    if "In msg nelems" in args:
        received = _count(args.get("Out msg nelems", 0))
        elements = max(_count(args["In msg nelems"]), received)
        types = [args.get("dtype")]
    dtypes = map(_dtype, types) if isinstance(types, list) else ()
    external = args.get("External id")
    group = args.get("Process Group Description")
    return Call(
        operation=operation,
        start=at[0],
        stop=at[1],
        thread=thread,
        is_operator=name.startswith("c10d::"),
        external=external if isinstance(external, int) else 0,
        dtype=next(filter(None, dtypes), ""),
        elements=elements,
        ranks=_count(args.get("Group size", 0)) or _ranks(operation, shapes),
        group=printable(group[:80]) if isinstance(group, str) else "",
    )


def _ranks(operation: str, shapes: list[int]) -> int:
    """Number of ranks by the sizes of input and output; 0 where they do not tell."""
    tensors = sorted(filter(None, shapes[:2]))
    if operation not in ("all_gather", "reduce_scatter") or len(tensors) != 2:
        return 0
    part, whole = tensors
    return 0 if whole % part else whole // part


def is_nccl(kernel: str) -> bool:
    """Whether a kernel is NCCL's."""
    return kernel[:4].lower() == "nccl"


def _operation(name: str) -> str | None:
    plain = name[:80].split("(")[0].lower().replace("_", "")
    known = next((each for each in _OPERATIONS if each.replace("_", "") in plain), None)
    return known or ("send_recv" if "coalesced" in plain else None)


def _without_operation(name: str) -> str:
    """The name of a call of an unknown operation; "" for torch's own event about it."""
    if is_nccl(name):
        return "nccl"
    return "" if name == COMMS else printable(name[:40])


def _dtype(text: object) -> str:
    """Short name of ``BFloat16``, ``c10::Half``, ``long int``; "" where it is
    unknown.
    """
    plain = str(text)[:40].split("::")[-1].replace(" ", "").lower()
    return next(
        (short for short, spelled in _DTYPES.items() if plain in spelled.split()), ""
    )


def _elements(dims: Any) -> int:
    """Elements of a tensor of this shape, or of a list of tensors; 1 for a number."""
    if not isinstance(dims, list):
        return 0
    if dims and isinstance(dims[0], list):
        return sum(map(_elements, dims))
    elements = 1
    for size in dims:
        elements = _count(elements * _count(size))
    return elements


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ValueError(f"{str(value)[:40]!r} is no number of elements or ranks")
    return value
