"""What was run, as a table in Markdown.

`bash tests/run.sh --table tests/ranks/results/topologies` prints it.

``gpt.check`` and ``training.trained`` note what they have verified; nothing else gets in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from support.runs.cases import FFN, GROUPS, HEADS

Rows = dict[tuple[str, str], list[str]]  # (model, precision) -> topologies


def table() -> list[str]:
    """Lines: bitwise comparisons with one process, then training by Megatron's own schedules."""
    from support.models import gpt
    from support.runs import training

    lines = ["| model | precision | bitwise equal to one process |", "|---|---|---|"]
    lines += _lines(_grouped((_case(c), _precision(c), _topology(t)) for c, t in gpt.VERIFIED))
    lines += ["", "| model | precision | trained, the loss fell in each step |", "|---|---|---|"]
    muons = [(c, t) for c, t in training.TRAINED if c.optimizer == "muon"]
    return lines + _lines(_grouped((_case(c), _precision(c), _topology(t)) for c, t in muons))


def _grouped(runs: Iterable[tuple[str, str, str]]) -> Rows:
    rows: Rows = {}
    for model, precision, topology in runs:
        topologies = rows.setdefault((model, precision), [])
        if topology not in topologies:
            topologies.append(topology)
    return rows


def _lines(rows: Rows) -> list[str]:
    return [
        f"| {model} | {precision} | {'; '.join(_merged(topologies))} |"
        for (model, precision), topologies in sorted(rows.items())
    ]


def _merged(topologies: list[str]) -> list[str]:
    """With and without overlap as one."""
    both = {topology for topology in topologies if f"{topology} overlap" in topologies}
    return [
        f"{topology} ± overlap" if topology in both else topology
        for topology in sorted(topologies, key=lambda words: (words.count(" "), words))
        if topology.removesuffix(" overlap") not in both or topology in both
    ]


def _case(case: Any) -> str:
    experts = {"": "SequentialMLP", "legacy": "GroupedMLP", "te": "TE's grouped (stand-in)"}
    words = [f"MoE, {experts[case.grouped]}" if case.moe else "dense"]
    words += [f"MLA, {case.mla} down-projections"] * bool(case.mla) + ["MTP"] * case.mtp
    words += ["tied"] * case.tied + ["gated"] * case.gated
    if (case.heads, case.groups) != (HEADS, GROUPS):
        words.append(f"{case.heads} heads, {case.groups} query group(s)")
    words += ["gated attention"] * case.output_gate + [f"ffn {case.ffn}"] * (case.ffn != FFN)
    words += ["no shared expert"] * (case.moe and not case.shared)
    words += ["full recompute"] * case.recompute
    words += ["own lr and decay"] * bool(case.faster) + ["overflow"] * bool(case.overflow)
    return ", ".join(words)


def _precision(case: Any) -> str:
    name = "fp16" if case.fp16 else "bf16" if case.bf16 else "fp32"
    return name + ", gradients too" * (not case.fp32_grads)


def _topology(t: Any) -> str:
    sizes = {"TP": t.tp, "PP": t.pp, "CP": t.cp, "DP": t.dp, "EP": t.ep}
    words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    words += [f"ETP{t.expert_tp}"] * (t.ep > 1 and t.tp > 1)
    words += [f"VPP{t.chunks}"] * (t.chunks > 1) + [f"{t.instances} instances"] * (t.instances > 1)
    words += ["SP"] * t.sequence_parallel + ["allgather"] * (
        t.ep > 1 and t.dispatcher == "allgather"
    )
    words += ["step overlap" if t.step_overlap else "overlap"] * (t.overlap or t.step_overlap)
    return " ".join(words) or "1 process"
