"""A logging step of Llama-3-8B on GPUs, priced: ``cd tests && python -m figures.watch_launches``.

A virtual GPU records the Muon part of a step, with and without logging, on the busiest of 8 H100
with DP 8. Printed are launches, waits of the host, messages, and peak memory over the optimizer's
state. The time that logging adds is at most the sum of three: launches on the host, the products
of two Gram matrices in fp32, and the bytes that the other operations move.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_muon.lab.pricing.hardware import MICRO, TERA
from megatron_muon.lab.pricing.presets import H100
from megatron_muon.mcore.watching.observer import MatrixObserver
from megatron_muon.mcore.watching.rows import Message, Table, muon_rows
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.settings.config import MuonConfig
from support.virtual_gpu.device.tensors import CUDA
from support.virtual_gpu.plans import MODELS, plans_of
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.step import muon_of, record
from support.virtual_gpu.trace import Kernel, StepStart

_PRODUCTS = ("addmm_",)  # those of Gram matrices; Newton-Schulz has none in place
_CASTS = ("_to_copy", "copy_", "clone")  # the range that they read may have gaps: count the result


def recorded(plan: ExchangePlan, rank: int, config: MuonConfig, *, logs: bool) -> Recording:
    """The second step of Muon alone, with what a logging step adds around it."""
    numbers = dict.fromkeys(("muon_elements", "all_elements", "flops", "busiest", "ranks"), 1)
    stage = {"muon": muon_rows(plan.matrices, config), "adamw": [], "layers": [], "logits": []}
    table = Table([{**stage, **numbers}], plan.size)

    def program(gpu: Any, group: Any) -> None:
        muon, groups, states = muon_of(plan, rank, Numerics(config), group, CUDA)
        observer = MatrixObserver(muon)
        for _ in range(2):  # the first step starts the power iteration
            gpu.trace.events.append(StepStart())
            if logs:
                message = Message(table, CUDA)
                observer.observe_weights(message)
                muon.observe(observer)
            muon.step(groups, states, lambda: gpu.launch("adamw", [], [], 1))
            if logs:
                message.total(0, observer.stopwatch.milliseconds())

    return record(rank, plan.size, program)


def _moved(recording: Recording) -> float:
    """Bytes that operations other than products read and write."""
    total = 0.0
    for event in recording.step:
        if not isinstance(event, Kernel) or event.name in _PRODUCTS:
            continue
        written = _bytes(event.writes)
        total += 1.5 * written if event.name in _CASTS else written + _bytes(event.reads)
    return total


def _bytes(ranges: Iterable[tuple[int, int, int]]) -> int:
    return sum(stop - start for _, start, stop in ranges)


def main() -> None:
    """Print both recordings and the price of their difference."""
    model = MODELS[0]
    config, [(_, plan)] = plans_of(model)
    work = plan.ns_flops()
    rank = work.index(max(work))
    off, on = (recorded(plan, rank, config, logs=logs) for logs in (False, True))
    print(f"{model.name}, rank {rank}: {len(plan.for_rank(rank).homes)} matrices at home")
    for name, each in (("no logging", off), ("logging", on)):
        print(
            f"{name}: {each.launches:,} launches, {len(each.host_syncs)} waits of the host, "
            f"{len(each.collectives)} messages, peak {each.peak_bytes / (1 << 20):,.0f} MiB"
        )
    homes = [plan.matrices[index] for index in plan.for_rank(rank).homes]
    flops = 2 * sum(2 * min(m.rows, m.cols) * m.numel for m in homes)
    rate = H100.fp32_tflops * H100.gemm_efficiency * TERA
    parts = {
        "launches on the host": (on.operations - off.operations) * H100.launch_us * MICRO,
        "Gram matrices": flops / rate,
        "other operations": (_moved(on) - _moved(off)) / H100.memory,
    }
    for name, seconds in parts.items():
        print(f"{name}: {1e3 * seconds:,.0f} ms")


if __name__ == "__main__":
    main()
