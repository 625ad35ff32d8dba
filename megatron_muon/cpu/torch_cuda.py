"""CPU stand-ins for the parts of ``torch.cuda`` that Megatron calls unconditionally."""

import contextlib
import functools
import importlib
import inspect
import itertools
import time
from typing import Any

import torch
from torch.utils import _device

from megatron_muon.runtime.patches import Function, Patches

CPU = torch.device("cpu")
FACTORIES = (
    "tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "eye",
    "linspace", "rand", "randn", "randint", "randperm", "zeros_like", "ones_like",
    "empty_like", "full_like", "rand_like", "randn_like", "empty_strided",
)  # fmt: skip


def is_cuda(device: object) -> bool:
    """Whether a ``device`` argument means a GPU: 'cuda', 'cuda:1',
    torch.device('cuda'), 0.
    """
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        # '1' of flagos-ai's fork
        return device.startswith("cuda") or device.isdecimal()
    return isinstance(device, int) and not isinstance(device, bool)


def current_device(patches: Patches) -> None:
    """``current_device()`` is only ever passed on as a ``device=``, so the device
    itself serves.

    Layers, buffers and p2p allocate on it (tensor_parallel/layers.py:261).
    """
    patches.set_all(
        torch.cuda, current_device=lambda: CPU, set_device=lambda device: None
    )


def _on_cpu(factory: Function) -> Function:
    @functools.wraps(factory)
    def made_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made_on_cpu


def factories(patches: Patches) -> None:
    """``torch.zeros(..., device='cuda')`` and friends make CPU tensors, without
    pinning.

    optimizer.py:473, clip_grads.py:103 and schedules.py:596 name 'cuda' outright.
    """
    # torch looks up once what ``with torch.device(...)`` acts on: it must not keep
    # replacements.
    patches.on_undo(_device._device_constructors.cache_clear)
    for name in FACTORIES:
        patches.set(torch, name, _on_cpu(getattr(torch, name)))


def _to(original: Function, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if args and is_cuda(args[0]):
        args = (CPU, *args[1:])
    if is_cuda(kwargs.get("device")):
        kwargs["device"] = CPU
    return original(tensor, *args, **kwargs)


def _itself(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def moves(patches: Patches) -> None:
    """``.cuda()``, ``.to('cuda')`` and ``.pin_memory()`` leave a tensor where it is.

    Batches and loaded scaler state are moved to the GPU; ``Module.cuda`` goes through
    these.
    """
    patches.set_all(torch.Tensor, cuda=_itself, pin_memory=_itself)
    patches.wrap("torch", "Tensor.to", _to)


def _type(
    original: Function, tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if dtype is None:
        # of a subclass, which asks for its parts', a GPU's already
        name: str = original(tensor)
        is_cpus = tensor.device.type == "cpu" and not name.startswith("torch.cuda.")
        return name.replace("torch.", "torch.cuda.", 1) if is_cpus else name
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    return original(tensor, dtype, *args, **kwargs)


def tensor_type(patches: Patches) -> None:
    """``t.type()`` of a CPU tensor says ``'torch.cuda.FloatTensor'``; ``t.type(dtype)``
    casts.

    The optimizers sort parameters by that name (distrib_optimizer.py:361,
    optimizer.py:671).
    """
    patches.wrap("torch", "Tensor.type", _type)


def rng(patches: Patches) -> None:
    """The CPU generator is the GPU's: one state, which the fork in Megatron saves and
    restores.

    The RNG tracker seeds and saves the GPU's (tensor_parallel/random.py:235). A
    DataLoader, which one TP rank alone has, draws a seed from the CPU's: from one of
    its own here, or dropout would differ between TP ranks.
    """
    one = torch.default_generator

    numbers = itertools.count()

    def with_generator(init: Function, *args: Any, **kwargs: Any) -> None:
        call = inspect.signature(init).bind(*args, **kwargs)
        if call.arguments.get("generator") is None:
            seed = torch.initial_seed() + next(numbers)
            call.arguments["generator"] = torch.Generator().manual_seed(seed)
        init(*call.args, **call.kwargs)

    patches.wrap("torch.utils.data", "DataLoader.__init__", with_generator)
    stand_ins = {
        "get_rng_state": lambda device="cuda": one.get_state(),
        "set_rng_state": lambda new_state, device="cuda": one.set_state(new_state),
        "manual_seed": lambda seed: one.manual_seed(int(seed)),
    }
    for module in (torch.cuda, torch.cuda.random):
        patches.set_all(module, **stand_ins)


def _nothing(*args: object, **kwargs: object) -> None:
    """What marks or orders nothing."""


class _InOrder:
    """Work on the CPU is done when a call returns, so nothing waits."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        """Always done."""
        return True

    synchronize = wait = wait_stream = wait_event = __exit__ = _nothing

    def __enter__(self) -> Any:
        return self


class Event(_InOrder):
    """A point in time."""

    def record(self, stream: object = None) -> None:
        """Note the time."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds between the two ``record()`` calls."""
        return (end_event._seconds - self._seconds) * 1e3


class Stream(_InOrder):
    """The one order in which a CPU thread works."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record and return ``event``, a new one if none is given."""
        event = Event() if event is None else event
        event.record(self)
        return event


def streams(patches: Patches) -> None:
    """Streams and events that order nothing, because CPU work is already in program
    order.

    They are called around p2p (p2p_communication.py:398), by timers, and for the
    overlapped reductions of several optimizer instances
    (distributed_data_parallel.py:230).
    """
    stream = Stream()
    patches.set_all(
        torch.cuda,
        Stream=Stream,
        Event=Event,
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        synchronize=lambda device=None: None,
        is_current_stream_capturing=lambda: False,
    )
    patches.set(torch.Tensor, "record_stream", lambda self, stream: None)


def nvtx(patches: Patches) -> None:
    """Profiler ranges (utils.py:2186) mark nothing: a CPU build of torch has no
    NVTX.
    """
    patches.set_all(
        torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing, mark=_nothing
    )


def compiler(patches: Patches) -> None:
    """``torch.compile`` returns the function unchanged, as Megatron's own no-op fuser
    does.

    megatron.core.jit compiles the fused functions, which on a CPU needs a C++ compiler
    and seconds for each function on each rank; eager gives the same values.
    """

    def uncompiled(model: Any = None, **options: Any) -> Any:
        return (lambda function: function) if model is None else model

    patches.set(torch, "compile", uncompiled)


def compiled_before(patches: Patches) -> None:
    """Functions that ``torch.compile`` has wrapped already run uncompiled."""
    config: Any = importlib.import_module("torch._dynamo").config
    patches.on_undo(functools.partial(setattr, config, "disable", config.disable))
    config.disable = True
