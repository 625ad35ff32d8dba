"""Elementwise work on CUDA with triton: one fused kernel for momentum, one for the
update.

Each is one launch for all slices of a round, through a table of their addresses. It
makes the same bits as ``muon.Foreach``, since each product and each sum rounds by
itself. With bf16 messages the two read and write 14 and 10 bytes per element, foreach
50 and 34. They take no scratch memory.

``try_elementwise`` compares them with foreach, bit by bit, before a run's first step.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, split_with_sizes

from megatron_muon.orthogonalize import triton_operations
from megatron_muon.orthogonalize.matmul import TORCH_DTYPE
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.orthogonalize.triton_operations import define, launching_beside
from megatron_muon.rules.muon import Foreach
from megatron_muon.settings.config import named

T = TypeVar("T")
_BLOCK = 2048  # elements; the same as in fused_kernels, whose import needs triton
_FP32 = (torch.float32,)
_TRAVELS = (torch.float32, torch.bfloat16)  # and gradients
_DIRECTIONS = (torch.float32, torch.bfloat16, torch.float16)


def _advance_momentum(
    buffers: list[Tensor],
    grads: list[Tensor],
    into: list[Tensor],
    moves: Tensor,
    rows: Tensor,
    slice_of_block: Tensor,
    momentum: float,
    nesterov: bool,
) -> None:
    from megatron_muon.rules.fused_kernels import launch_momentum

    with launching_beside(rows):
        launch_momentum(
            rows,
            slice_of_block,
            moves,
            grad=grads[0].dtype,
            into=into[0].dtype if into else moves.dtype,
            momentum=momentum,
            nesterov=nesterov,
        )


def _apply_updates(
    params: list[Tensor],
    directions: list[Tensor],
    rows: Tensor,
    slice_of_block: Tensor,
    factors: Tensor,
    cautious: bool,
) -> None:
    from megatron_muon.rules.fused_kernels import launch_update

    with launching_beside(rows):
        launch_update(
            rows,
            slice_of_block,
            factors,
            direction=directions[0].dtype,
            cautious=cautious,
        )


define(
    "advance_momentum(Tensor(a!)[] buffers, Tensor[] grads, Tensor(b!)[] into, "
    "Tensor(c!) moves, Tensor rows, Tensor slice_of_block, float momentum, bool "
    "nesterov) -> ()",
    _advance_momentum,
)
define(
    "apply_updates(Tensor(a!)[] params, Tensor[] directions, Tensor rows, Tensor "
    "slice_of_block, Tensor factors, bool cautious) -> ()",
    _apply_updates,
)


class Fused(Foreach):
    """``Foreach`` by kernels, for one list of slices, whose tables stay on the
    device.

    A table is made anew where an address or a size differs from the last call's. It is
    copied to the device from pinned memory, and the host does not wait; torch keeps
    that memory until then.
    """

    def __init__(self) -> None:
        self._momentum: dict[int, _Table] = defaultdict(_Table)
        self._update = _Table()
        self._factors: tuple[list[float], Tensor] | None = None

    def advance_momentum(
        self,
        momentum_buffers: Sequence[Tensor],
        grads: Sequence[Tensor],
        into: Sequence[Tensor | None],
        moves: Tensor,
        outgoing: Sequence[int],
        *,
        momentum: float | Sequence[float],
        nesterov: bool,
    ) -> None:
        """See ``Foreach``; one launch for each momentum."""
        moves.zero_()
        places = [-1] * len(momentum_buffers)
        for place, number in enumerate(outgoing):
            places[number] = place
        values = momentum if isinstance(momentum, Sequence) else [momentum]
        for at, value in enumerate(dict.fromkeys(values)):
            buffers, added, taken, some = (
                _with_value(each, momentum, value)
                for each in (momentum_buffers, grads, into, places)
            )
            table, slice_of_block = self._momentum[at].on_device(
                [buffers, added, taken], some, allowed=(_FP32, _TRAVELS, _TRAVELS)
            )
            if slice_of_block.numel():
                torch.ops.megatron_muon.advance_momentum(
                    buffers,
                    added,
                    [x for x in taken if x is not None],
                    moves,
                    table,
                    slice_of_block,
                    value,
                    nesterov,
                )

    def apply_updates(
        self,
        params: Sequence[Tensor],
        directions: Sequence[Tensor],
        factors: Sequence[float],
        decays: Sequence[float],
        *,
        cautious: bool = False,
    ) -> None:
        """See ``Foreach``; directions in fp32 are not overwritten."""
        if not params:
            return
        table, slice_of_block = self._update.on_device(
            [params, directions], allowed=(_FP32, _DIRECTIONS)
        )
        scalars = [*factors, *(1.0 - decay for decay in decays)]
        if self._factors is None or self._factors[0] != scalars:
            made = torch.tensor(scalars, dtype=torch.float32)
            self._factors = scalars, _on_device(made, params[0].device)
        if slice_of_block.numel():
            torch.ops.megatron_muon.apply_updates(
                list(params),
                list(directions),
                table,
                slice_of_block,
                self._factors[1],
                cautious,
            )

    def blend(
        self,
        params: Sequence[Tensor],
        directions: Sequence[Tensor],
        keeps: Tensor,
        factors: Tensor,
    ) -> None:
        """See ``Foreach``."""
        table, slice_of_block = self._update.on_device(
            [params, directions], allowed=(_FP32, _DIRECTIONS)
        )
        if slice_of_block.numel():
            scalars = torch.cat([factors, keeps])
            torch.ops.megatron_muon.apply_updates(
                list(params), list(directions), table, slice_of_block, scalars, False
            )


def _with_value(
    every: Sequence[Any], values: float | Sequence[float], value: float
) -> list[Any]:
    """Those of ``every`` that have a value; all, where all have one."""
    if not isinstance(values, Sequence):
        return list(every)
    return [one for one, own in zip(every, values, strict=True) if own == value]


class _Table:
    """Sizes, first blocks and addresses of slices, and the slice of each block, on the
    device.
    """

    def __init__(self) -> None:
        self._sizes: list[int] | None = None
        self._numbers: list[list[int]] = []
        self._firsts: list[int] = []
        self._rows = self._slice_of_block = torch.empty(0)

    def on_device(
        self,
        lists: Sequence[Sequence[Tensor | None]],
        places: list[int] | None = None,
        *,
        allowed: Sequence[tuple[torch.dtype, ...]],
    ) -> tuple[Tensor, Tensor]:
        """``(rows, slice of each block)``.

        Args:
            lists: parallel lists of tensors; the first has no None.
            places: numbers for a row between the first blocks and the addresses; None
                for no row.
            allowed: for each list, the dtypes that it may have.

        Raises:
            ValueError: a list has several dtypes or one that is not allowed, a tensor's
                size differs from its slice's, or a tensor is not contiguous.
        """
        sizes = [0 if tensor is None else tensor.numel() for tensor in lists[0]]
        numbers = [] if places is None else [places]
        numbers += [
            [0 if x is None else x.data_ptr() for x in tensors] for tensors in lists
        ]
        if sizes == self._sizes and numbers == self._numbers:
            return self._rows, self._slice_of_block
        for tensors, dtypes in zip(lists, allowed, strict=True):
            _check(tensors, sizes, dtypes)
        device = next(
            (x.device for x in lists[0] if x is not None), torch.device("cpu")
        )
        if sizes != self._sizes:
            blocks = [-(-size // _BLOCK) for size in sizes]
            self._firsts = [0, *accumulate(blocks)][:-1]
            every = torch.arange(len(sizes), dtype=torch.int32)
            of_blocks = torch.repeat_interleave(
                every, torch.tensor(blocks, dtype=torch.int64)
            )
            self._slice_of_block = _on_device(of_blocks, device)
        table = torch.tensor([sizes, self._firsts, *numbers], dtype=torch.int64)
        self._rows = _on_device(table, device)
        self._sizes, self._numbers = sizes, numbers
        return self._rows, self._slice_of_block


def _check(
    tensors: Sequence[Tensor | None],
    sizes: Sequence[int],
    allowed: tuple[torch.dtype, ...],
) -> None:
    dtypes = {x.dtype for x in tensors if x is not None}
    if len(dtypes) > 1 or not dtypes.issubset(allowed):
        raise ValueError(
            "a fused kernel takes tensors of one dtype of "
            f"{', '.join(map(str, allowed))}, got "
            f"{', '.join(sorted(map(str, dtypes)))}; {_WAY_OUT}"
        )
    for tensor, size in zip(tensors, sizes, strict=True):
        if tensor is not None and (
            tensor.numel() != size or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"a fused kernel takes contiguous slices of {size} elements, got shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}; {_WAY_OUT}"
            )


def _on_device(table: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, from pinned memory, so that the host waits for nothing."""
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)


# --- the choice of a run --------------------------------------------------------------

_WAY_OUT = (
    f"set {named('elementwise')} foreach: torch's operations on lists take its place"
)


def elementwise_on(device: torch.device, numerics: Numerics) -> Callable[[], Foreach]:
    """``Fused`` on CUDA where triton is installed and ``elementwise`` is auto; else
    ``Foreach``.
    """
    wanted = numerics.config.elementwise == "auto"
    takes_kernels = wanted and device.type == "cuda" and triton_operations.has_triton()
    return Fused if takes_kernels else Foreach


def describe_elementwise(device: torch.device, numerics: Numerics) -> str:
    """The log's words for the elementwise operations in use."""
    if elementwise_on(device, numerics) is Fused:
        return "fused kernels (triton)"
    missing = device.type == "cuda" and numerics.config.elementwise == "auto"
    return "torch's foreach" + (", since triton is not installed" if missing else "")


def try_elementwise(device: torch.device, numerics: Numerics) -> None:
    """Compile the fused kernels, where they would be used, and compare them with
    foreach.

    All variants that a step launches are made here, so that none is compiled within the
    step, where a rank that cannot would leave others waiting.

    Raises:
        RuntimeError: they do not compile or run, or make other bits; names the way out.
    """
    if elementwise_on(device, numerics) is Foreach:
        return
    try:
        made = _patiently(lambda: trial(Fused(), device, numerics))
        expected = trial(Foreach(), device, numerics)
        differ = not all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    except Exception as error:  # of any type: triton calls two compilers
        raise RuntimeError(
            "the fused kernels of momentum and update do not run: "
            f"{type(error).__name__}: {error}. Install a release of triton that fits "
            "this GPU and torch, and a C compiler, set TRITON_CACHE_DIR to a folder on "
            f"the node's own disk, or {_WAY_OUT}"
        ) from error
    if differ:
        raise RuntimeError(
            "the fused kernels of momentum and update round otherwise than "
            "torch's operations here, so that results would depend on them: "
            f"{_WAY_OUT}. Please report it"
        )


def _patiently(work: Callable[[], T]) -> T:
    """The result of ``work``, which compiles: again where the cache's file system
    refuses.

    All ranks write the same files at once. On a shared file system one then gets EBUSY
    or ESTALE, or finds a file gone; moments later what it wanted is there.
    """
    for seconds in (0.1, 0.3, 1.0, 3.0, 9.0):
        try:
            return work()
        except OSError:
            time.sleep(seconds * random.uniform(0.5, 1.5))
    return work()


def trial(kind: Foreach, device: torch.device, numerics: Numerics) -> list[Tensor]:
    """All results of two steps, with slices at odd offsets, whole blocks and a gradient
    of zeros.

    Gradients are in fp32 in the first and in bf16 in the second. Directions are in the
    dtype that travels in the first and in fp16 in the second, in which that of a slice
    is not finite. Rules with a second moment of each element, whose directions are
    fp32, have a third.
    """
    sizes = [3, 3 * _BLOCK + 5, 2 * _BLOCK, 7]
    elements = math.sqrt(2) * torch.arange(1, sum(sizes) + 1, dtype=torch.float64)
    values = [torch.sin(factor * elements).float().to(device) for factor in (1, 3, 5)]
    buffers, grads, params = (list(split_with_sizes(x, sizes)) for x in values)
    grads[3].zero_()
    sent = torch.zeros(sum(sizes), dtype=TORCH_DTYPE[numerics.travels], device=device)
    targets: list[Tensor | None] = [None, *split_with_sizes(sent, sizes)[1:]]
    moves = torch.zeros(3, dtype=sent.dtype, device=device)
    steps = [(sent.dtype, torch.float32), (torch.float16, torch.bfloat16)]
    for dtype, of_grads in steps:
        kind.advance_momentum(
            buffers,
            [grad.to(of_grads) for grad in grads],
            targets,
            moves,
            (3, 1, 2),
            momentum=numerics.config.momentum,
            nesterov=numerics.config.nesterov,
        )
        directions = list(split_with_sizes(sent.to(dtype, copy=True), sizes))
        if dtype == torch.float16:
            directions[1][0] = math.inf
        kind.apply_updates(
            params,
            directions,
            [0.3, 0.007, 0.1, 1e-4],
            [0.0, 1e-3, 0.1, 0.0],
            cautious=numerics.config.cautious_decay,
        )
    return [values[0], values[2], sent, moves]
