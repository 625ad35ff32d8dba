"""The report of a comparison: Markdown, and JSON with every figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_muon.lab.compare.compared import Compared, table
from megatron_muon.lab.compare.figures import GRADIENTS, PARAMETERS, TRAVELLING, bound
from megatron_muon.lab.compare.report import slow_links
from megatron_muon.orthogonalize.iteration import Device

_DEVICES: dict[Device, str] = {
    "cpu": "CPUs without bf16 instructions",
    "cpu_bf16": "CPUs with bf16 instructions",
    "cuda": "GPUs with torch's matmul, fused AdamW and triton",
    "cuda_symmetric": "GPUs with quack-kernels, fused AdamW and triton",
}


def as_json(run: dict[str, Any], compared: Sequence[Compared]) -> dict[str, Any]:
    """All figures.

    Args:
        run: the command line, model, machine and versions, the kind of device that is planned for,
            and why no link was slowed, if so.
        compared: in the order of the topologies.
    """
    return {
        "run": run,
        "bytes_per_element": {
            "gradients": GRADIENTS,
            "parameters": PARAMETERS,
            "exchange": TRAVELLING,
        },
        "bound_of_the_paper": {"these_buffers": bound(), "all_fp32": bound(4, 4, 2)},
        "topologies": [
            {
                "name": str(each.topology),
                "sizes": asdict(each.topology),
                "adamw": asdict(each.adamw),
                "muon": asdict(each.muon),
                "byte_ratio": each.byte_ratio,
                "predicted": asdict(each.predicted),
                "peak_ratio": each.peak_ratios,
                "slow_links": slow_links.as_json(each),
            }
            for each in compared
        ],
    }


def as_markdown(run: dict[str, Any], compared: Sequence[Compared]) -> str:
    """A page: time, bytes, memory, losses, slow links, and what each ratio rests on."""
    parts = [
        "# AdamW and Muon over several topologies",
        f"`megatron-muon compare {' '.join(run['arguments'])}`",
        f"{run['model']}; {run['ranks']}; {run['versions']}.",
        "## Time\n\nMedian over the steps after the first two, of the slowest rank.",
        table(
            ["topology", "AdamW: step, ms", "optimizer", "Muon: step, ms", "optimizer", "ratio"],
            [_time_row(each) for each in compared],
        ),
        "## Bytes\n\nSent by all ranks in a step for gradients, parameters and Muon's exchange. "
        f"An element has {GRADIENTS} bytes in a gradient's reduction, {PARAMETERS} in the gather "
        f"of parameters and {TRAVELLING} each way in the exchange. With these dtypes the paper's "
        f"own algorithm sends at most {bound():.3f} times AdamW's; its bound of 1.25 holds where "
        "gradients and parameters travel in fp32. That bound counts a gather over DP. The exchange "
        "goes over TP, too, and back, so the ratio passes it where most matrices travel. Bytes of "
        "forward and backward passes are the same for both and are left out.",
        table(
            [
                "topology",
                "AdamW, MB",
                "Muon's exchange, MB",
                "planned",
                "busiest rank, MB",
                "ratio",
            ],
            [_bytes_row(each) for each in compared],
        ),
        "## Memory\n\nfp32 main parameters and optimizer state of the fullest rank, measured and "
        "planned.",
        table(
            ["topology", "AdamW, MB", "planned", "Muon, MB", "planned"],
            [_state_row(each) for each in compared],
        ),
        "Peak of Megatron's `optimizer.step()` above everything that was there before it, on the "
        f"rank that has most, measured and planned for {_DEVICES[run['planned_for']]}. Single "
        "numbers, such as norms and flags, are not planned.",
        table(
            ["topology", "AdamW, MB", "planned", "ratio", "Muon, MB", "planned", "ratio"],
            [_peak_row(each) for each in compared],
        ),
        f"## Losses\n\nOf a text that repeats itself, {len(compared[0].muon.losses)} steps: they "
        "show that both train, and nothing about which is better.",
        table(
            ["topology", "AdamW: first, last", "Muon: first, last"],
            [_loss_row(each) for each in compared],
        ),
        *slow_links.as_markdown(compared, run["no_links"]),
    ]
    return "\n\n".join(parts) + "\n"


def _time_row(each: Compared) -> list[str]:
    return [
        str(each.topology),
        *(
            text
            for one in (each.adamw, each.muon)
            for text in (f"{one.step_ms:.1f}", f"{one.optimizer_ms:.1f} ({one.share:.0%})")
        ),
        f"{each.muon.step_ms / each.adamw.step_ms:.2f}",
    ]


def _bytes_row(each: Compared) -> list[str]:
    ratio = "AdamW sends none" if each.byte_ratio is None else f"{each.byte_ratio:.3f}"
    return [
        str(each.topology),
        _mb(each.adamw.megatrons),
        _mb(each.muon.exchange),
        _mb(each.predicted.exchange),
        _mb(each.muon.busiest),
        ratio,
    ]


def _state_row(each: Compared) -> list[str]:
    planned = each.predicted
    return [
        str(each.topology),
        _mb(each.adamw.state_bytes),
        _mb(planned.adamw_state),
        _mb(each.muon.state_bytes),
        _mb(planned.muon_state),
    ]


def _peak_row(each: Compared) -> list[str]:
    planned, ratios = each.predicted, each.peak_ratios
    rows = (
        ("adamw", each.adamw.peak_bytes, planned.adamw_peak),
        ("muon", each.muon.peak_bytes, planned.muon_peak),
    )
    cells = [str(each.topology)]
    for name, measured, expected in rows:
        ratio = ratios[name]
        cells += [_mb(measured), _mb(expected), "" if ratio is None else f"{ratio:.4f}"]
    return cells


def _loss_row(each: Compared) -> list[str]:
    return [
        str(each.topology),
        *(f"{one.losses[0]:.3f}, {one.losses[-1]:.3f}" for one in (each.adamw, each.muon)),
    ]


def _mb(count: int) -> str:
    return f"{count / 1e6:.3f}"
