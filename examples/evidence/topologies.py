"""Prints the tables of ``megatron-muon compare``'s reports: topologies, slow links, memory.

    python topologies.py [FOLDER ...]

prints those of the figures in the clone, or of the ``report.json`` in each given folder. A report
itself may be given in place of its folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parent / "figures"
MB = 1e6


def table(found: dict[str, Any]) -> str:
    """A row for each topology: Muon's step beside AdamW's, and both beside the plan."""
    head = ["topology", "time of a step beside AdamW's", "bytes beside AdamW's", "exchange, MB"]
    head += ["planned", "fullest rank's state, AdamW, Muon, MB", "planned"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    for each in found["topologies"]:
        adamw, muon, planned = each["adamw"], each["muon"], each["predicted"]
        ratio = each["byte_ratio"]
        cells = [
            each["name"],
            f"{muon['step_ms'] / adamw['step_ms']:.2f}",
            "AdamW sends none" if ratio is None else f"{ratio:.3f}",
            f"{muon['exchange'] / MB:.3f}",
            f"{planned['exchange'] / MB:.3f}",
            f"{adamw['state_bytes'] / MB:.2f}, {muon['state_bytes'] / MB:.2f}",
            f"{planned['adamw_state'] / MB:.2f}, {planned['muon_state'] / MB:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def peaks(found: dict[str, Any]) -> str:
    """A row for each topology: state, and the peak of an optimizer step above it."""
    head = ["topology", "AdamW: state, MB", "planned", "peak above it", "planned"]
    head += ["Muon: state, MB", "planned", "peak above it", "planned", "furthest from the plan"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    for each in found["topologies"]:
        cells, furthest = [each["name"]], 0.0
        for name in ("adamw", "muon"):
            for kind in ("state", "peak"):
                measured = each[name][f"{kind}_bytes"]
                planned = each["predicted"][f"{name}_{kind}"]
                cells += [f"{measured / MB:.3f}", f"{planned / MB:.3f}"]
                furthest = max(furthest, abs(measured / planned - 1) if planned else 0.0)
        lines.append(f"| {' | '.join(cells)} | {furthest:.3%} |")
    return "\n".join(lines)


def steps_over_links(found: dict[str, Any]) -> str:
    """A row for each topology and rate of a rank's link, the fastest first."""
    lines = [
        "| topology | Mbit/s | AdamW, ms | model | MB | Muon, ms | model | MB | ratio | model |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for each in found["topologies"]:
        free = {name: each[name]["step_ms"] for name in ("adamw", "muon")}
        cells = [f"{free['adamw']:.0f}", "", "", f"{free['muon']:.0f}", "", ""]
        cells += [f"{free['muon'] / free['adamw']:.2f}", ""]
        lines.append(f"| {each['name']} | as it is | {' | '.join(cells)} |")
        for step in sorted(each["slow_links"]["steps"], key=lambda step: -step["mbits"]):
            cells = []
            for name in ("adamw", "muon"):
                cells += [f"{step[name]['step_ms']:.0f}", f"{step['model'][f'{name}_ms']:.0f}"]
                cells.append(f"{step[name]['link_bytes'] / MB:.2f}")
            cells += [f"{step['ratio']:.2f}", f"{step['model']['ratio']:.2f}"]
            lines.append(f"| {each['name']} | {step['mbits']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ends(found: dict[str, Any]) -> str:
    """For each topology and leading ratio: the rate at which both need the same time to a loss."""
    leads = [each["lead"] for each in found["topologies"][0]["slow_links"]["model"]]
    names = [name for lead in leads for name in (f"lead {lead:g}", "model")]
    lines = [f"| topology | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}"]
    for each in found["topologies"]:
        links = each["slow_links"]
        both = zip(links["measured"], links["model"], strict=True)
        cells = [_end(one) for pair in both for one in pair]
        lines.append(f"| {each['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _end(found: dict[str, Any]) -> str:
    if not found["changes"]:
        return "Muon at every rate" if found["ahead_without_limit"] else "AdamW at every rate"
    return ", then ".join(map(_change, found["changes"]))


def _change(change: dict[str, Any]) -> str:
    word = "ends" if change["ends"] else "begins"
    rate = "no limit" if change["mbits"] is None else f"{change['mbits']:.3g}"
    if change["between"] is None:
        return f"{word} {rate}"
    slow, fast = ("as it is" if each is None else f"{each:g}" for each in change["between"])
    return f"{word} {rate} ({slow} to {fast})"


def tables(found: dict[str, Any]) -> str:
    """The tables that a report has figures for; an older report has no planned peaks."""
    first = found["topologies"][0]
    if first["slow_links"]["measured"] is not None:
        return f"{steps_over_links(found)}\n\n{ends(found)}"
    if "muon_peak" not in first["predicted"]:
        return table(found)
    return f"{table(found)}\n\n{peaks(found)}"


def main(given: list[str]) -> None:
    for path in map(Path, given):
        report = path / "report.json" if path.is_dir() else path
        print(tables(json.loads(report.read_text())), end="\n\n")
    if not given:
        for name in ("compare", "links"):
            print(tables(_figures(name)), end="\n\n")
        print(peaks(_figures("memory")))


def _figures(name: str) -> Any:
    return json.loads((FIGURES / f"{name}.json").read_text())


if __name__ == "__main__":
    main(sys.argv[1:])
