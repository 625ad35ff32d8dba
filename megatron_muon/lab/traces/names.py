"""Collectives by the names and arguments of profiler events: operation, bytes, group.

NCCL kernels have names such as ``ncclDevKernel_AllGather_RING_LL(...)`` and, from torch 2.2 on,
arguments such as ``In msg nelems``. gloo's events are ``gloo:all_reduce``; the operator that
started one is ``c10d::_reduce_scatter_base_``, with the shapes of its tensors where they were
recorded.
"""

from __future__ import annotations

import math
import re
from typing import Any

_NCCL = re.compile(r"^nccl(?:Dev)?(?:Kernel_?)?(\w+)", re.IGNORECASE)
_OPERATIONS = (  # a part of the name without underscores; the longer ones first
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("barrier", "barrier"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
    ("recv", "recv"),
    ("send", "send"),
    ("coalesced", "send_recv"),
)
# gloo has no reduce-scatter of its own: an all-reduce does the work.
_BY_GLOO = {"reduce_scatter": "all_reduce"}
_SIZES = {
    **{"float": 4, "float32": 4, "int": 4, "int32": 4, "uint32": 4},
    **{"double": 8, "float64": 8, "long": 8, "longint": 8, "int64": 8, "uint64": 8},
    **{"half": 2, "float16": 2, "bfloat16": 2, "short": 2, "int16": 2, "uint16": 2},
    **{"byte": 1, "char": 1, "bool": 1, "int8": 1, "uint8": 1},
    **{"signedchar": 1, "unsignedchar": 1},
    **{"float8_e4m3fn": 1, "float8_e5m2": 1, "complexfloat": 8, "complexdouble": 16},
}
_SHORT = {
    **{"float": "fp32", "float32": "fp32", "double": "fp64", "float64": "fp64"},
    **{"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "int": "int32"},
    **{"long": "int64", "longint": "int64", "byte": "uint8", "unsignedchar": "uint8"},
    **{"char": "int8", "signedchar": "int8"},
}


def operation(name: str) -> str | None:
    """The collective that a name has in it, such as ``all_gather``, or None."""
    plain = name.lower().replace("_", "")
    return next((said for part, said in _OPERATIONS if part in plain), None)


def nccl_operation(kernel: str) -> str | None:
    """The collective of an NCCL kernel; None for the name of another kernel."""
    match = _NCCL.match(kernel)
    return None if match is None else operation(match[1]) or "nccl"


def backends_operation(said: str) -> str:
    """The name that gloo's event has for an operation."""
    return _BY_GLOO.get(said, said)


def bus_factor(said: str, ranks: int | None) -> float | None:
    """Bytes that a rank sends over bytes of the message, for a ring, as nccl-tests counts them.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

    Args:
        said: the operation.
        ranks: number of ranks in the group, or None where the trace does not tell.
    """
    if said in ("send", "recv", "send_recv", "broadcast", "reduce"):
        return 1.0
    if not ranks:
        return None
    if said == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks


def dtype_of(text: str) -> tuple[str, int | None]:
    """(short name, bytes) of a dtype as traces spell it: ``BFloat16``, ``c10::Half``, ``float``."""
    plain = text.removeprefix("c10::").removeprefix("at::").replace(" ", "").lower()
    return _SHORT.get(plain, plain), _SIZES.get(plain)


def message(args: dict[str, Any]) -> tuple[str, int | None]:
    """(dtype, bytes) of the whole buffer of a collective; "" and None where it does not say.

    The whole buffer is an all-gather's output and a reduce-scatter's input.

    Raises:
        ValueError: a count or a shape is none.
    """
    if "In msg nelems" in args:
        elements = max(_count(args["In msg nelems"]), _count(args.get("Out msg nelems", 0)))
        dtype, size = dtype_of(str(args.get("dtype", "")))
        return dtype, None if size is None else elements * size
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list):
        return "", None
    dtype, size = next(
        (sized for sized in map(dtype_of, map(str, types)) if sized[1] is not None), ("", None)
    )
    elements = max(
        (
            _elements(shape) or int(dtype_of(str(text))[1] is not None)  # a number has the shape []
            for shape, text in zip(dims, types, strict=False)
        ),
        default=0,
    )
    return dtype, None if size is None else elements * size


def group_size(args: dict[str, Any]) -> int | None:
    """The number of ranks in a collective's group, where the trace tells it.

    Raises:
        ValueError: it is no count.
    """
    if "Group size" in args:
        return _count(args["Group size"]) or None
    return None


def sizes_ratio(args: dict[str, Any]) -> int | None:
    """The whole buffer over a rank's part of it, from the shapes of an operator's two tensors."""
    dims = args.get("Input Dims")
    if not isinstance(dims, list):
        return None
    sizes = [size for size in map(_elements, dims[:2]) if size]
    if len(sizes) != 2 or max(sizes) % min(sizes):
        return None
    return max(sizes) // min(sizes)


def _elements(dims: Any) -> int:
    """Elements of a tensor of this shape, or of a list of tensors."""
    if not isinstance(dims, list) or not dims:
        return 0
    if isinstance(dims[0], list):
        return sum(map(_elements, dims))
    return math.prod(map(_count, dims))


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no number of elements or ranks")
    return value
