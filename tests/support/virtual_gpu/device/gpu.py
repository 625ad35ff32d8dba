"""The GPU: a dispatch mode that runs each operation on the meta device and records
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.virtual_gpu.device.crossing import CROSSINGS, without_pinning
from support.virtual_gpu.device.launches import (
    EMPTY,
    FREE,
    fills_empty,
    launches,
    leaves_term,
)
from support.virtual_gpu.device.tensors import META, DeviceBlock, VirtualTensor, ranges
from support.virtual_gpu.trace import MAIN, Allocation, HostSync, Kernel, Trace, place

_ROUNDING = 512  # bytes: what the caching allocator rounds a block up to
_REFUSED = "resize_ set_ nonzero masked_select unique_dim _unique2".split()


@dataclass(frozen=True, slots=True)
class _Kind:
    """An operation's schema, as the recorder needs it."""

    name: str  # without namespace and overload
    written: tuple[int | str, ...]  # positions and names of arguments that it writes
    overwrites: bool  # it does not read what it writes
    view: bool  # its results are views of its first tensor
    fresh: bool  # it writes nothing and makes no view: results follow from shapes


_OVERWRITING = """
    copy_ _foreach_copy_ fill_ zero_ _foreach_zero_ uniform_ normal_ random_ bernoulli_
""".split()


def _kind(func: Any) -> _Kind:
    schema = func._schema
    name: str = schema.name.split("::")[-1]
    written: list[int | str] = []
    aliased = name in ("_unsafe_view", "_reshape_alias")
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        if argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else index)
        else:
            aliased = True
    overwrites = name in _OVERWRITING or any(isinstance(x, str) for x in written)
    view = aliased and not written
    return _Kind(name, tuple(written), overwrites, view, fresh=not written and not view)


_kinds: dict[Any, _Kind] = {}
_results: dict[Any, Any] = {}  # shapes of results, by operation and arguments


class Gpu(TorchDispatchMode):
    """One virtual GPU; within ``with`` it is the process's only ``cuda`` device."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()  # everything that happens
        self.stream = MAIN  # the current stream's name
        self._blocks = 0
        self._call: str | None = None

    def __enter__(self) -> Gpu:
        if VirtualTensor.device_of is not None:
            raise RuntimeError("a virtual GPU is switched on already")
        VirtualTensor.device_of = self
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        VirtualTensor.device_of = None

    @contextmanager
    def called(self, name: str) -> Iterator[None]:
        """Host synchronisations within it are named so; the outermost call wins."""
        kept, self._call = self._call, self._call or name
        try:
            yield
        finally:
            self._call = kept

    def synchronize(
        self, name: str, stream: str | None = None, event: int | None = None
    ) -> None:
        """The host waits: for a stream, an event or, with neither, for everything."""
        self.trace.events.append(
            HostSync(self._call or name, stream, event, self.trace.phase, place())
        )

    def launch(
        self,
        name: str,
        reads: Sequence[VirtualTensor],
        writes: Sequence[VirtualTensor],
        count: int = 1,
    ) -> None:
        """Record a kernel on the current stream."""
        if count:
            trace = self.trace
            trace.events.append(
                Kernel(
                    name,
                    self.stream,
                    count,
                    ranges(reads),
                    ranges(writes),
                    trace.phase,
                    place(),
                )
            )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation: on the meta device, recorded, its results wrapped."""
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = _kind(func)
        special = _SPECIAL.get(kind.name)
        if special is not None:
            result = special(self, func, args, kwargs)
            if result is not NotImplemented:
                return result
        inputs: list[VirtualTensor] = []
        inner = [_inner(x, inputs) for x in args]
        named = (
            {key: _inner(x, inputs) for key, x in kwargs.items()} if kwargs else kwargs
        )
        if not inputs and named.get("device") is not META:
            return func(*args, **without_pinning(kwargs))
        if kind.name in _REFUSED:
            raise NotImplementedError(
                f"a virtual GPU has no {func}: sizes follow from elements"
            )
        return self._wrapped(kind, func, args, kwargs, inputs, inner, named)

    def _wrapped(
        self,
        kind: _Kind,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[VirtualTensor],
        inner: list[Any],
        named: dict[str, Any],
    ) -> Any:
        if kind.view:
            base, foreign = inputs[0].block, inputs[0].is_foreign
            return _map_tensors(
                func(*inner, **named),
                lambda t: VirtualTensor(t, base, is_foreign=foreign),
            )
        if kind.fresh:
            made = self._fresh(func, inner, named)
            out = _map_tensors(made, self.allocate)
            results: list[VirtualTensor] = []
            _map_tensors(out, results.append)
        else:
            func(*inner, **named)
            results = []
            for at in kind.written:
                value = kwargs.get(at) if isinstance(at, str) else args[at]
                _map_tensors(value, results.append)
            out = results[0] if len(func._schema.returns) == 1 else None
            if len(func._schema.returns) > 1:
                out = tuple(results)
        if kind.name in EMPTY and fills_empty() and results[0].numel():
            self.launch("fill_empty", [], results)
        elif kind.name not in FREE:
            reads = inputs
            if kind.overwrites:
                written = set(map(id, results))
                reads = [x for x in inputs if id(x) not in written]
            if leaves_term(kind.name, named):
                reads = [x for x in reads if x is not args[0]]
            metas = [x.inner for x in inputs]
            count = launches(kind.name, inner, named, metas, [x.inner for x in results])
            self.launch(kind.name, reads, results, count)
        return out

    def _fresh(self, func: Any, inner: list[Any], named: dict[str, Any]) -> Any:
        """New tensors on the meta device. Torch makes some shapes in slow Python: kept
        by key.
        """
        key = (func, *map(_key, inner), *((k, _key(v)) for k, v in named.items()))
        try:
            known = _results.get(key)
        except TypeError:  # an argument that cannot be a key
            return func(*inner, **named)
        if known is None:
            out = func(*inner, **named)
            _results[key] = _map_tensors(
                out, lambda t: _Shape(t.size(), t.stride(), t.dtype)
            )
            return out
        return _remade(known)

    def allocate(self, inner: Tensor) -> VirtualTensor:
        self._blocks += 1
        block = DeviceBlock(self._blocks, self)
        nbytes = -(-inner.untyped_storage().nbytes() // _ROUNDING) * _ROUNDING
        trace = self.trace
        trace.events.append(
            Allocation(block.number, nbytes, self.stream, trace.phase, place())
        )
        return VirtualTensor(inner, block)


@dataclass(frozen=True, slots=True)
class _Shape:
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _remade(known: Any) -> Any:
    if isinstance(known, _Shape):
        return torch.empty_strided(
            known.size, known.stride, dtype=known.dtype, device=META
        )
    return type(known)(map(_remade, known))


def _inner(value: Any, inputs: list[VirtualTensor]) -> Any:
    kind = type(value)
    if kind is VirtualTensor or isinstance(value, VirtualTensor):
        inputs.append(value)
        return value.inner
    if kind is list or kind is tuple:
        return kind(_inner(x, inputs) for x in value)
    if kind is torch.device and value.type == "cuda":
        return META
    return value


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return type(value), value


def _map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        made = [_map_tensors(x, change) for x in value]
        return tuple(made) if isinstance(value, tuple) else made
    return value


def _phase_enter(gpu: Gpu, func: Any, args: Any, kwargs: Any) -> Any:
    gpu.trace.enter(args[0])
    return NotImplemented


def _phase_exit(gpu: Gpu, func: Any, args: Any, kwargs: Any) -> Any:
    gpu.trace.leave()
    return NotImplemented


_SPECIAL = {
    **CROSSINGS,
    "_record_function_enter_new": _phase_enter,
    "_record_function_enter": _phase_enter,
    "_record_function_exit": _phase_exit,
}
