"""Text and JSON of ``megatron-muon plan``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from megatron_muon.lab.plan.rows import TITLES, PlannedStep, Spread
from megatron_muon.lab.plan.run import RunPlan, StagePlan
from megatron_muon.lab.pricing import upstream
from megatron_muon.lab.pricing.hardware import CONSTANTS
from megatron_muon.lab.pricing.memory import KINDS
from megatron_muon.lab.pricing.step import PHASES
from megatron_muon.lab.routes.table import numbers
from megatron_muon.lab.tables import aligned, wrapped
from megatron_muon.planning.describe import Share
from megatron_muon.version import __version__

MB, MIB, TERA = 1e6, 1 << 20, 1e12
# Measured over predicted, least and most, in the back-tests of docs/plan.md.
BACK_TESTS = 0.45, 1.16
# The assumptions of the plan in addition to constants and the training step.
ASSUMPTIONS = (
    "not in the optimizer step: gradient reduction, norm and clipping, all-gather of "
    "parameters, the copy to 16-bit weights; AdamW and Muon have them alike",
    "all ranks begin the step at the same moment, and a rank takes the same time in "
    "every step",
    "the compute and the communication stream do not slow each other down",
    "a rank waits only for ranks that it shares bytes with; a message has its share of "
    "both links",
    "a product takes whole waves of tiles of cuBLAS on Hopper, 128x256 at best and "
    "64x64 at least",
    "kernels of momentum, norm and update read and write memory, whatever the L2 cache "
    "holds: fused ones 14, 6 and 10 bytes per element, with --muon-elementwise foreach "
    "50, 12 and 34 (lab/pricing/step.py, kernels.py); AdamW's 28",
    "state on the host: Muon's goes both ways at once; AdamW there has 80 bytes per "
    "element",
    "a library's kernel for symmetric products also adds the linear term; torch's "
    "addmm copies it first",
    "memory: without activations, the allocator's rounding, and what NCCL and cuBLAS "
    "take",
    "Megatron's own Muon: its launches' Python and its padding are not counted, and "
    "its owners are balanced by priced time",
    "ranges of times: measured over predicted was 0.45 to 0.47 for published steps of "
    "Megatron's own Muon on GB300s, 1.02 to 1.16 for ranks over gloo that wait for "
    "each other (docs/plan.md)",
)


def as_text(plan: RunPlan) -> str:
    """A table for each kind of stage, then the step of the slowest one."""
    lines = [*_head(plan), ""]
    for kind in plan.kinds:
        lines += [*_stage(kind), ""]
    return "\n".join([*lines, *_whole(plan)])


def answer(plan: RunPlan) -> str:
    """What Muon costs in place of AdamW, in one line."""
    more = plan.seconds(plan.layout) - plan.seconds("adamw")
    peak = (plan.peak(plan.layout) - plan.peak("adamw")) / MIB
    return (
        f"Muon: {1e3 * more:+,.1f} ms a step, {100 * plan.slower(plan.layout):+.2f} % "
        f"of a training step, {abs(peak):,.0f} MiB {'less' if peak < 0 else 'more'} at "
        "the peak"
    )


def assumption_lines(plan: RunPlan) -> list[str]:
    """Every assumption with its source."""
    assumed = (*plan.assumptions, *plan.hardware.lines(), *ASSUMPTIONS)
    rules = " ".join(line.strip() for line in _rules()).split(" - ")
    lines = ["assumptions, each with its source; --set NAME=VALUE changes a constant:"]
    lines += [line for text in assumed for line in wrapped(f"  {text}", "    ")]
    lines += [line for text in rules for line in wrapped(f"  {text}", "    ")]
    return lines


def as_json_ready(plan: RunPlan) -> dict[str, object]:
    """All figures; bytes, flops and seconds."""
    sources = dict(plan.hardware.sources)
    constants = {
        name: {
            "value": getattr(plan.hardware, name),
            "unit": unit,
            "source": sources.get(name),
        }
        for name, unit in CONSTANTS.items()
    }
    return {
        "version": __version__,
        "hardware": {"name": plan.hardware.name, "constants": constants},
        "device": plan.device,
        "measured_over_predicted": BACK_TESTS,
        "layout": plan.layout,
        "ranks": dataclasses.asdict(plan.ranks),
        "settings": dataclasses.asdict(plan.config),
        "training": {
            **dataclasses.asdict(plan.training),
            "seconds": plan.training.seconds(plan.hardware),
        },
        "step": {
            name: {
                "seconds": plan.seconds(name),
                "share": plan.share(name),
                "slower_than_adamw": plan.slower(name),
            }
            for name in plan.names
        },
        "stages": [dataclasses.asdict(kind) for kind in plan.kinds],
        "assumptions": [*plan.assumptions, *ASSUMPTIONS, *plan.notes, *_rules()],
    }


def ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{1e3 * seconds:,.1f}"


def _rules() -> list[str]:
    """The rules by which Megatron's own Muon is planned, and where they come from."""
    parts = (upstream.__doc__ or "").split("\n\n")[1:3]
    return [line for part in parts for line in part.split("\n")]


def _head(plan: RunPlan) -> Iterator[str]:
    ranks = plan.ranks
    sizes = {"TP": ranks.tp, "CP": ranks.cp, "PP": ranks.pp, "EP": ranks.ep}
    split = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    products = "a library's" if plan.device == "cuda_symmetric" else "torch's"
    whole = sum((kind.share for kind in plan.kinds for _ in kind.stages), start=Share())
    yield (
        f"{ranks.world:,} ranks{f' ({split})' if split else ''} of "
        f"{plan.hardware.name}, {plan.hardware.gpus_per_node} a node"
    )
    yield (
        f"{whole.total / 1e9:,.2f} G parameters, {whole.muon / 1e9:,.2f} G of them "
        f"Muon's; symmetric products: {products}"
    )
    step = plan.training
    yield from wrapped(
        f"a step of {step.tokens // step.sequence:,} sequences of {step.sequence:,} "
        f"tokens, forward and backward at an MFU of {step.mfu:.0%}: percentages below "
        "depend on them (--global-batch-size, --seq-length, --mfu)"
    )
    for note in plan.notes:
        yield from wrapped(note)


def _stage(kind: StagePlan) -> Iterator[str]:
    several = f" (like it: {numbers(kind.stages[1:])})" if len(kind.stages) > 1 else ""
    yield from wrapped(
        f"pipeline stage {kind.stages[0]}{several}: {kind.ranks:,} rank(s), "
        f"{kind.matrices:,} matrices; {kind.reduced / MB:,.1f} MB a rank for gradients "
        "and parameters, with any optimizer"
    )
    header = ["mean / most of a rank", *(TITLES[row.name] for row in kind.rows)]
    none = {_HOST: "0", **dict.fromkeys(_RARE, "-")}  # lines that most runs lack
    figures = [
        (name, of)
        for name, of in FIGURES
        if any(of(row) != none.get(name, "") for row in kind.rows)
    ]
    yield from aligned([header, *([name, *map(of, kind.rows)] for name, of in figures)])


def _whole(plan: RunPlan) -> Iterator[str]:
    where = "" if len(plan.kinds) == 1 else ", slowest stage"
    rows = [["optimizer step" + where, "ms", "of training", "slower than AdamW's"]]
    for name in plan.names:
        mark = " (this run)" if name == plan.layout else ""
        slower = "" if name == "adamw" else f"{plan.slower(name):+.2%}"
        share = f"{plan.share(name):.2%}"
        least, most = (ms(plan.seconds(name) * factor) for factor in BACK_TESTS)
        with_bar = f"{ms(plan.seconds(name))} ({least}-{most})"
        rows.append([TITLES[name] + mark, with_bar, share, slower])
    yield from aligned(rows)
    seconds = ms(plan.training.seconds(plan.hardware))
    yield f"forward and backward: {seconds} ms, as assumed; --assumptions prints all"


def _both(spread: Spread, unit: float, digits: int) -> str:
    mean, most = (f"{value / unit:,.{digits}f}" for value in (spread.mean, spread.most))
    return mean if mean == most else f"{mean} / {most}"


def _count(spread: Spread) -> str:
    return _both(spread, 1, 1) if spread.mean != spread.most else f"{spread.most:,.0f}"


def _seconds(name: str) -> Callable[[PlannedStep], str]:
    def of(row: PlannedStep) -> str:
        seconds = getattr(row, name)
        return "-" if seconds is None else ms(seconds)

    return of


_FULL, _BLOCK = "a full step, ms", "a block step, ms"
_LINK, _THERE = "state to the host, ms", "AdamW there, ms"
_RARE = _FULL, _BLOCK, _LINK, _THERE
_HOST = "state on the host, MiB"
FIGURES: tuple[tuple[str, Callable[[PlannedStep], str]], ...] = (
    (
        "boundary parameters",
        lambda row: "-" if row.boundary is None else f"{row.boundary:,}",
    ),
    ("sent in the node, MB", lambda row: _both(row.inside, MB, 1)),
    ("sent between nodes, MB", lambda row: _both(row.between, MB, 1)),
    ("peers", lambda row: _count(row.peers)),
    ("messages", lambda row: _count(row.messages)),
    ("Newton-Schulz, Tflop", lambda row: _both(row.flops, TERA, 2)),
    ("busiest / mean", lambda row: f"{row.uneven:.2f}" if row.flops.mean else "-"),
    ("rounds", lambda row: "+".join(map(str, row.rounds)) or "-"),
    ("launches", lambda row: f"{row.launches:,}"),
    *(
        (f"{kind}, MiB", lambda row, kind=kind: f"{row.rest[kind] / MIB:,.0f}")
        for kind in KINDS
    ),
    ("in all at rest, MiB", lambda row: f"{sum(row.rest.values()) / MIB:,.0f}"),
    (_HOST, lambda row: f"{row.host / MIB:,.0f}"),
    (
        "more at the peak, MiB",
        lambda row: "-" if row.peak is None else f"{row.peak / MIB:,.0f}",
    ),
    *(
        (
            f"{name}, ms",
            lambda row, name=name: ms(row.phases[name]) if name in row.phases else "-",
        )
        for name in PHASES
        if name != "waiting"
    ),
    (_LINK, _seconds("link")),
    (_THERE, _seconds("on_host")),
    ("exposed, ms", lambda row: _both(row.exposed, 1e-3, 1)),
    ("hidden, ms", lambda row: ms(row.hidden)),
    (_FULL, _seconds("full")),
    (_BLOCK, _seconds("block")),
    ("step, ms", lambda row: ms(row.seconds)),
)
