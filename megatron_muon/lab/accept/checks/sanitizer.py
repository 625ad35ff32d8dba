"""Torch's CUDA sanitizer over steps of Megatron's optimizer, and the virtual GPU's own check."""

from __future__ import annotations

import torch

from megatron_muon.lab.accept.checks.model import flags_of, row_of, task_of
from megatron_muon.lab.accept.outcome import Finding
from megatron_muon.lab.accept.settings import Settings

_STEPS = 2
_ELEMENTS = 1 << 24
_STEP, _PLANTED = "no race in two steps", "a race that is planted is found"


def run(settings: Settings) -> list[Finding]:
    """On GPUs the sanitizer; on the virtual GPU its record of streams; else nothing."""
    from megatron_muon.lab.bench.ranks import run_ranks

    if settings.device == "cpu":
        return [Finding(name, "not run", settings.why_no_gpu) for name in (_STEP, _PLANTED)]
    if settings.device == "virtual":
        why = "the virtual GPU has no addresses, by which the sanitizer knows a tensor"
        sanitizer = Finding("torch's CUDA sanitizer", "not run", why)
        return [sanitizer, on_virtual_gpu(settings), planted_on_virtual_gpu()]
    return judged(run_ranks(task_of(settings, under_sanitizer, settings, 110.0)))


def judged(ranks: list[tuple[str, str]]) -> list[Finding]:
    """Two parts, from each rank's error of the steps and of the planted race; empty for none."""
    faults = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(ranks) if error]
    missed = [str(rank) for rank, (_, error) in enumerate(ranks) if not error]
    if faults:
        why = "the steps raced first"
        return [
            Finding(_STEP, "FAILED", "; ".join(faults)),
            Finding(_PLANTED, "not run", why),
        ]
    step = Finding(_STEP, "ok")
    if missed:
        why = f"not on rank(s) {', '.join(missed)}, so its silence on the steps shows nothing"
        return [step, Finding(_PLANTED, "FAILED", why)]
    return [step, Finding(_PLANTED, "ok")]


def under_sanitizer(settings: Settings) -> tuple[str, str]:
    """On a rank: the sanitizer's errors of two steps, and of a planted race."""
    from torch.cuda import _sanitizer

    from megatron_muon.lab.bench.step.build import build
    from megatron_muon.lab.bench.step.meter import StepTimers
    from megatron_muon.lab.dry_run.model import ranks_of
    from megatron_muon.lab.dry_run.world import initialize_groups

    flags = flags_of(settings, tiny=True)
    initialize_groups(ranks_of(flags))
    device = torch.device("cuda", torch.cuda.current_device())
    _sanitizer.enable_cuda_sanitizer()  # type: ignore[no-untyped-call]
    built = build(row_of("muon-contiguous"), flags, StepTimers(device))
    try:
        for _ in range(_STEPS):
            step(built.chunks, built.optimizer)
    except _sanitizer.CUDASanitizerErrors as errors:
        return " ".join(str(errors).split())[:2000], "not tried"
    try:
        plant(device)
    except _sanitizer.CUDASanitizerErrors as errors:
        return "", " ".join(str(errors).split())[:200]
    return "", ""


@torch.no_grad()
def step(chunks: list[object], optimizer: object) -> None:
    """One step on gradients of 0.01, reduced as in a run."""
    for chunk in chunks:
        chunk.zero_grad_buffer()  # type: ignore[attr-defined]
        for param in chunk.parameters():  # type: ignore[attr-defined]
            param.main_grad.fill_(0.01)
        chunk.finish_grad_sync()  # type: ignore[attr-defined]
    optimizer.step()  # type: ignore[attr-defined]
    torch.cuda.synchronize()


def plant(device: torch.device) -> None:
    """Write a tensor on two streams that nothing orders."""
    tensor = torch.zeros(_ELEMENTS, device=device)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        tensor.mul_(2.0)
    torch.cuda.synchronize()


def on_virtual_gpu(settings: Settings) -> Finding:
    """The races and early frees that the virtual GPU finds in two steps of each rank."""
    from megatron_muon.lab.accept.checks.predicted import report

    flags, config = flags_of(settings, tiny=True), row_of("muon-contiguous").config
    reports = [report(flags, config, rank) for rank in range(settings.ranks)]
    faults = [fault for each in reports for fault in (*each.races, *each.early_frees)]
    if faults:
        return Finding(_STEP, "FAILED", "; ".join(faults))
    return Finding(_STEP, "ok", f"streams of {len(reports)} rank(s), by the virtual GPU's record")


def planted_on_virtual_gpu() -> Finding:
    """Whether the virtual GPU finds the planted race."""
    from support.virtual_gpu.step import closed, virtual_gpu

    with virtual_gpu() as gpu, torch.no_grad():
        plant(torch.device("cuda"))
        races = closed(0, gpu).races
    if races:
        return Finding(_PLANTED, "ok", "by the virtual GPU's record")
    return Finding(_PLANTED, "FAILED", "not by the virtual GPU, so its silence shows nothing")
