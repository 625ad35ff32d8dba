"""Text and JSON of ``megatron-muon plan``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from megatron_muon.lab.plan.rows import TITLES, PlannedStep, Spread
from megatron_muon.lab.plan.run import RunPlan, StagePlan
from megatron_muon.lab.pricing import upstream
from megatron_muon.lab.pricing.hardware import CONSTANTS
from megatron_muon.lab.pricing.memory import KINDS
from megatron_muon.lab.pricing.step import AROUND, PHASES
from megatron_muon.lab.routes.table import numbers
from megatron_muon.lab.tables import aligned, wrapped
from megatron_muon.orthogonalize.numerics import Numerics, has_kernel
from megatron_muon.planning.describe import Share
from megatron_muon.version import __version__

MB, MIB, TERA = 1e6, 1 << 20, 1e12
# Measured over predicted, least and most, in the back-tests of docs/plan.md.
BACK_TESTS = 0.54, 1.16
# The assumptions of the plan in addition to constants and the training step.
ASSUMPTIONS = (
    "not in the optimizer step: gradient reduction, norm and clipping, all-gather of "
    "parameters, the copy to 16-bit weights; they are the same with AdamW and Muon",
    "the whole step: the larger of the host's launches, phases and shards, and of the "
    "device's time, with norm, clipping and copy by their bytes",
    "all ranks begin the step at the same moment, and a rank takes the same time in "
    "every step",
    "the compute and the communication stream do not slow each other down",
    "a rank waits only for ranks that it shares bytes with; a message has its share of "
    "both links",
    "a product takes whole waves of tiles of cuBLAS on Hopper, 128x256 at best and "
    "64x64 at least",
    "kernels of momentum, norm and update read and write memory, whatever the L2 cache "
    "holds: those of momentum and update 14 and 10 bytes per element, with "
    "--muon-elementwise foreach 50 and 34, those of the norm 12 (lab/pricing/step.py, "
    "kernels.py); AdamW's 28",
    "state on the host: Muon's goes both ways at once; AdamW there has 80 bytes per "
    "element",
    "a library's kernel for symmetric products also adds the linear term; torch's "
    "addmm copies it first",
    "memory: without activations, the allocator's rounding, and what NCCL and cuBLAS "
    "take",
    "Megatron's own Muon: its launches' Python and its padding are not counted, and "
    "its owners are balanced by priced time",
    "ranges of times: measured over predicted was 0.54 for a published step of "
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
    rules = " ".join(line.strip() for line in _rules()).split(" - ")
    lines = ["assumptions, each with its source; --set NAME=VALUE changes a constant:"]
    for text in (*plan.assumptions, *plan.hardware.lines(), *ASSUMPTIONS, *rules):
        lines += wrapped(f"  {text}", "    ")
    return lines


def as_json_ready(plan: RunPlan) -> dict[str, object]:
    """All figures; bytes, flops and seconds."""
    hardware = plan.hardware
    sources = dict(hardware.sources)
    constants = {
        name: {
            "value": getattr(hardware, name),
            "unit": unit,
            "source": sources.get(name),
        }
        for name, unit in CONSTANTS.items()
    }
    training = dataclasses.asdict(plan.training)
    steps = {
        name: {
            "seconds": plan.seconds(name),
            "share": plan.share(name),
            "slower_than_adamw": plan.slower(name),
        }
        for name in plan.names
    }
    return {
        "version": __version__,
        "hardware": {"name": hardware.name, "constants": constants},
        "device": plan.device,
        "measured_over_predicted": BACK_TESTS,
        "layout": plan.layout,
        "ranks": dataclasses.asdict(plan.ranks),
        "settings": dataclasses.asdict(plan.config),
        "training": training | {"seconds": plan.training.seconds(hardware)},
        "step": steps,
        "stages": [dataclasses.asdict(kind) for kind in plan.kinds],
        "assumptions": [*plan.assumptions, *ASSUMPTIONS, *plan.notes, *_rules()],
    }


def ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{1e3 * seconds:,.1f}"


def _rules() -> list[str]:
    """The rules by which Megatron's own Muon is planned, and where they come from."""
    parts = (upstream.__doc__ or "").split("\n\n")[1:3]
    return "\n".join(parts).split("\n")


def _head(plan: RunPlan) -> Iterator[str]:
    ranks = plan.ranks
    sizes = {"TP": ranks.tp, "CP": ranks.cp, "PP": ranks.pp, "EP": ranks.ep}
    split = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    products = "a library's" if has_kernel(plan.device) else "torch's"
    whole = Share()
    for kind in plan.kinds:
        whole = sum([kind.share] * len(kind.stages), start=whole)
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
    numerics = Numerics(plan.config, plan.device)
    if plan.config.preset == "fast" and not numerics.segments:
        yield from wrapped(
            f"--muon-ns-steps {plan.config.ns_steps}: no restarts of the Gram "
            f"iteration in {numerics.dtype} are known for these coefficients, so "
            "matrices get the standard one, which may take longer than more steps"
        )
    for note in plan.notes:
        yield from wrapped(note)


def _stage(kind: StagePlan) -> Iterator[str]:
    others = f" (like it: {numbers(kind.stages[1:])})" if len(kind.stages) > 1 else ""
    yield from wrapped(
        f"pipeline stage {kind.stages[0]}{others}: {kind.ranks:,} rank(s), "
        f"{kind.matrices:,} matrices; {kind.reduced / MB:,.1f} MB a rank for gradients "
        "and parameters, with any optimizer"
    )
    columns = [_figures(row) for row in kind.rows]
    rows = [["mean / most of a rank", *(TITLES[row.name] for row in kind.rows)]]
    for name in columns[0]:
        cells = [column[name] for column in columns]
        if name not in _RARE or set(cells) != {_RARE[name]}:
            rows.append([name, *cells])
    yield from aligned(rows)


def _whole(plan: RunPlan) -> Iterator[str]:
    where = "" if len(plan.kinds) == 1 else ", slowest stage"
    rows = [["optimizer step" + where, "ms", "of training", "slower than AdamW's"]]
    for name in plan.names:
        seconds = plan.seconds(name)
        mark = " (this run)" if name == plan.layout else ""
        slower = "" if name == "adamw" else f"{plan.slower(name):+.2%}"
        least, most = (ms(seconds * factor) for factor in BACK_TESTS)
        with_bar = f"{ms(seconds)} ({least}-{most})"
        rows.append([TITLES[name] + mark, with_bar, f"{plan.share(name):.2%}", slower])
    yield from aligned(rows)
    training = ms(plan.training.seconds(plan.hardware))
    yield f"forward and backward: {training} ms, as assumed; --assumptions prints all"


# Lines that are printed only where a cell differs from this one.
_RARE = {
    "state on the host, MiB": "0",
    "state to the host, ms": "-",
    "AdamW there, ms": "-",
    "a full step, ms": "-",
    "a block step, ms": "-",
}


def _figures(row: PlannedStep) -> dict[str, str]:
    """The column of an algorithm: its cells, by the name of their line."""

    def or_none(value: float | None, text: Callable[[float], str]) -> str:
        return "-" if value is None else text(value)

    phases = {
        f"{name}, ms": or_none(row.phases.get(name), ms)
        for name in PHASES
        if name != "waiting"
    }
    return {
        "boundary parameters": or_none(row.boundary, "{:,}".format),
        "sent in the node, MB": _both(row.inside, MB, 1),
        "sent between nodes, MB": _both(row.between, MB, 1),
        "peers": _count(row.peers),
        "messages": _count(row.messages),
        "Newton-Schulz, Tflop": _both(row.flops, TERA, 2),
        "busiest / mean": f"{row.uneven:.2f}" if row.flops.mean else "-",
        "rounds": "+".join(map(str, row.rounds)) or "-",
        "launches": f"{row.launches:,}",
        **{f"{kind}, MiB": _mib(row.rest[kind]) for kind in KINDS},
        "in all at rest, MiB": _mib(sum(row.rest.values())),
        "state on the host, MiB": _mib(row.host),
        "more at the peak, MiB": or_none(row.peak, _mib),
        **phases,
        "state to the host, ms": or_none(row.link, ms),
        "AdamW there, ms": or_none(row.on_host, ms),
        "exposed, ms": _both(row.exposed, 1e-3, 1),
        "hidden, ms": ms(row.hidden),
        "a full step, ms": or_none(row.full, ms),
        "a block step, ms": or_none(row.block, ms),
        "step, ms": ms(row.seconds),
        **{f"{name}, ms": or_none(row.around.get(name), ms) for name in AROUND},
        "host, ms": or_none(row.launching, ms),
        "whole step, ms": or_none(row.whole, ms),
    }


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f}"


def _both(spread: Spread, unit: float, digits: int) -> str:
    mean, most = (f"{value / unit:,.{digits}f}" for value in (spread.mean, spread.most))
    return mean if mean == most else f"{mean} / {most}"


def _count(spread: Spread) -> str:
    return _both(spread, 1, 0 if spread.mean == spread.most else 1)
