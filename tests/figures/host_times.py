"""The host's time of a step: ``cd tests && python -m figures.host_times [WORD ...]``

Megatron's whole optimizer with Muon inside steps on rank 0, over tensors of torch's
meta device: nothing is computed, sent, waited for or recorded. What is left is Python,
the package's and Megatron's, and torch from a call to where it would launch a kernel.
Meta kernels that are slow Python answer from a table. Not in it: launches of triton's
kernels, and torch's sends and receives.

Medians of 15 steps, in ms of the thread's processor time, by the parts that Megatron's
timers name, each without those inside it. PYTHONPATH=TREE measures another tree of
this repository; ``python -m cProfile -m`` names the functions.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_muon.cpu.on  # noqa: F401 before what imports Megatron
from megatron_muon.lab.bench.step.meter import StepTimers
from megatron_muon.lab.routes.model_flags import muon_settings
from megatron_muon.mcore.wiring import build
from megatron_muon.orthogonalize import triton_operations
from megatron_muon.runtime.patches import replaced
from support.installed import installed
from support.virtual_gpu import megatron
from support.virtual_gpu.device import cuda
from support.virtual_gpu.device import fused as kernels
from support.virtual_gpu.dry_run import ranks_of, world
from support.virtual_gpu.plans import EP, LLAMA_8B, OVERLAP, QWEN3_30B, TP, run_of
from support.virtual_gpu.step import without_cpu_runtime

CASES = {
    "Llama-3-8B TP1 × DP8": LLAMA_8B + "--world-size 8 ",
    "Llama-3-8B TP8 × DP64": LLAMA_8B + f"{TP} 8 --world-size 512 ",
    "Qwen3-30B-A3B EP8, 32": QWEN3_30B + f"{EP} 8 --world-size 32 ",
    "Qwen3-30B-A3B EP8, 1,024": QWEN3_30B + f"{EP} 8 --world-size 1024 ",
}
# Operations of aten with meta kernels in Python.
SLOW = (
    "add_.Tensor addmm addmm.out amax any baddbmm baddbmm.out bmm cat clamp_min "
    "div_.Tensor div.Tensor gt.Scalar index_add_ index_copy_ index_select isnan "
    "linalg_vector_norm mm mul_.Tensor new_zeros pow.Tensor_Scalar sqrt stack sum "
    "where.self zeros zeros_like"
).split()


@contextmanager
def on_meta() -> Iterator[None]:
    """A context in which the GPU is the meta device; the host reads zeros from it."""
    torchs = {name: getattr(Tensor, name) for name in ("item", "tolist", "type", "to")}

    def read(x: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x

    def made(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, device: Any = None, **named: Any) -> Tensor:
            device = world.META if str(device).startswith("cuda") else device
            return factory(*args, device=device, **named)

        return make

    def same(every: list[Any], own: Any, group: Any = None) -> None:
        every[:] = [own] * len(every)

    gpu: Any = SimpleNamespace(
        stream="main",
        launch=lambda *_: None,
        synchronize=lambda *_: None,
        trace=SimpleNamespace(events=deque(maxlen=1)),
    )
    work = [SimpleNamespace(wait=lambda: None)]
    tensor = {
        "item": lambda x: torchs["item"](read(x)),
        "tolist": lambda x: torchs["tolist"](read(x)),
        "type": lambda x: torchs["type"](x).replace("meta", "cuda"),
        "to": lambda x, *a, **k: torchs["to"](read(x) if a == ("cpu",) else x, *a, **k),
    }
    with ExitStack() as stack:
        for owner, changes in (
            (cuda, {"CUDA": world.META}),
            (megatron, {"CUDA": world.META}),
            (kernels, {"CUDA": world.META}),
            (torch, {name: made(getattr(torch, name)) for name in ("tensor", "zeros")}),
            (dist, {"all_gather_object": same, "batch_isend_irecv": lambda _: work}),
            (torch.utils.dlpack, {"from_dlpack": lambda x: x}),
            (triton_operations, {"has_triton": lambda: True}),
            (build, {"try_elementwise": lambda *_: None}),
        ):
            stack.enter_context(replaced(owner, **changes))
            if owner is kernels:
                stack.enter_context(cuda.on_gpu(gpu))
        stack.enter_context(replaced(Tensor, **tensor))
        stack.enter_context(megatron._megatron(gpu))
        yield


@contextmanager
def quick(step: Callable[[], Any]) -> Iterator[None]:
    """A context in which the operations of ``SLOW`` answer as they did in a step."""
    known: dict[Any, Any] = {}

    def key(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(map(key, value))
        return (value.shape, value.dtype) if isinstance(value, Tensor) else value

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                name = str(func).removeprefix("aten.").removesuffix(".default")
                known[name, key(args)] = out.shape, out.dtype
            return out

    def answer(name: str) -> Callable[..., Tensor]:
        def run(*args: Any, out: Any = None, **named: Any) -> Any:
            if out is not None or name.split(".")[0].endswith("_"):
                return args[0] if out is None else out
            shape, dtype = known[name, key(args)]
            return torch.empty(shape, dtype=dtype, device=world.META)

        return run

    with Mode():  # type: ignore[no-untyped-call]
        step()
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in SLOW:
            library.impl(name, answer(name), "Meta")
        yield


def measured(words: str) -> dict[str, float]:
    """Milliseconds of a step by part."""
    run = run_of((words + OVERLAP).split())
    config = muon_settings(run.flags)
    ranks = ranks_of(run.flags)
    training = megatron.OptimizerSettings()
    watch = StepTimers(world.META)
    vars(watch)["_now"] = time.thread_time
    with without_cpu_runtime(), world.as_rank(0, ranks), on_meta(), installed(config):
        _, chain = megatron._built(run.flags, ranks, config, training)
        chain.step()
        with quick(chain.step):
            chain.step()
            gc.collect()
            gc.disable()
            whole = [watch.measure(chain.step).ms for _ in range(15)]
            for part in (chain, *chain.chained_optimizers):
                part.config.timers = watch
            watch.time(chain, "get_grad_norm", "norm")
            parts = [Counter(watch.measure(chain.step).parts_ms) for _ in range(15)]
            gc.enable()
    medians = {name: statistics.median(p[name] for p in parts) for name in parts[0]}
    return {"whole": statistics.median(whole)} | medians


def main() -> None:
    """Print a line for each model and part."""
    words = sys.argv[1:]
    for name, flags in CASES.items():
        if words and not any(word in name for word in words):
            continue
        for part, ms in measured(flags).items():
            print(f"{name}: {part} {ms:.2f}", flush=True)


if __name__ == "__main__":
    main()
