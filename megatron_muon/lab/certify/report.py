"""Text and JSON of ``megatron-muon certify``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

import torch

from megatron_muon.lab.certify.certificate import Certificate, Claim
from megatron_muon.lab.certify.kinds import StageKind
from megatron_muon.lab.certify.ranks import HostWaits, Launches, RankReport
from megatron_muon.lab.routes.model_flags import Settled
from megatron_muon.mcore.seams.rows import megatron_version
from megatron_muon.version import __version__

MIB = 1 << 20
_FAULTS = 8  # printed of a claim; the JSON has all
NOT_CHECKED = (
    "elements: nothing is computed, so no value, no NaN and no accuracy is seen",
    "time: streams are ordered, not timed",
    "forward and backward: they read parameters and write gradients and do nothing else; "
    "activations, pipeline messages and what Megatron reduces after backward are not there",
    "NCCL itself: its buffers, its launches' limits and its transport",
    "the allocator's fragmentation, cuBLAS' workspaces, CUDA graphs, streams that C++ takes itself",
    "kernels: Transformer Engine's Adam and norm and the fused ones of Muon are recorded by what "
    "they read and write, and not run; quack-kernels are taken not to be installed",
    "modules are Megatron's local ones, with --transformer-impl transformer_engine as well",
)


def as_text(certificate: Certificate, run: Settled, notes: Sequence[str], seconds: float) -> str:
    """A step's figures for each kind of stage, then the verdict, and what it is not about."""
    lines = [_head(run), ""]
    for kind, reports in zip(certificate.kinds, certificate.reports, strict=True):
        lines += [*_kind(kind, reports), ""]
    lines += ["verdict", *_verdict(certificate.claims), ""]
    lines += ["sampled", *(f"  {line}" for line in _sampled(certificate)), ""]
    lines += ["not checked", *(f"  {line}" for line in (*NOT_CHECKED, *notes)), ""]
    word = "certified" if certificate.holds else "NOT certified"
    lines.append(f"{word} on a virtual GPU in {seconds:.0f} s")
    return "\n".join(lines)


def as_json(certificate: Certificate, run: Settled, notes: Sequence[str], seconds: float) -> str:
    """Everything; bytes and counts."""
    kinds = [
        {
            "name": kind.name,
            "stages": list(kind.stages),
            "ranks": len(kind.members),
            "whole": kind.is_whole,
            "rounds": [len(each.plan.rounds) for each in kind.plans],
            "matrices": [len(each.plan.matrices) for each in kind.plans],
            "experts": [each.experts for each in kind.plans],
            "looked_at": [dataclasses.asdict(report) for report in reports],
        }
        for kind, reports in zip(certificate.kinds, certificate.reports, strict=True)
    ]
    said = {
        "versions": _versions(),
        "ranks": dataclasses.asdict(run.ranks),
        "settings": dataclasses.asdict(run.config),
        "holds": certificate.holds,
        "claims": [
            {**dataclasses.asdict(claim), "holds": claim.holds, "was_made": claim.was_made}
            for claim in certificate.claims
        ],
        "kinds": kinds,
        "compared": {name: list(both) for name, both in certificate.compared.items()},
        "sampled": list(_sampled(certificate)),
        "not_checked": [*NOT_CHECKED, *notes],
        "seconds": round(seconds, 1),
    }
    return json.dumps(said, indent=1)


def _versions() -> dict[str, str]:
    return {
        "megatron_muon": __version__,
        "megatron_core": megatron_version()[0],
        "torch": torch.__version__,
    }


def _head(run: Settled) -> str:
    ranks, versions = run.ranks, _versions()
    sizes = {"TP": ranks.tp, "CP": ranks.cp, "PP": ranks.pp, "EP": ranks.ep}
    split = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    if ranks.chunks:
        split += f", {ranks.chunks} chunks a stage"
    if ranks.instances > 1:
        split += f", {ranks.instances} optimizer instances"
    return (
        f"{ranks.world} ranks{f' ({split})' if split else ''}; megatron-muon "
        f"{versions['megatron_muon']}, megatron-core {versions['megatron_core']}, torch "
        f"{versions['torch']}"
    )


def _kind(kind: StageKind, reports: Sequence[RankReport]) -> Iterator[str]:
    which = f"stage {kind.stages[0]}"
    if len(kind.stages) > 1:
        which += f", which stands for {len(kind.stages)} stages alike ({_list(kind.stages)})"
    yield (
        f"{kind.name} stage: {which}; {len(kind.members)} ranks, "
        f"{'all' if kind.is_whole else len(kind.chosen)} looked at"
    )
    for each in kind.plans:
        groups = "experts" if each.experts else "dense"
        yield (
            f"  {groups}: {len(each.plan.matrices)} matrices in {len(each.plan.rounds)} round(s)"
        )
    if not reports:
        return
    yield "  optimizer.step() of a rank, MiB:"
    yield from (f"    {line}" for line in _table(reports))
    most = max(reports, key=lambda report: report.state_bytes + report.peak_bytes)
    yield f"  memory of rank {most.rank}, which has most, MiB:"
    yield f"    state: {_bytes_by_kind(most.state)}"
    yield f"    above it at the peak: {_bytes_by_kind(most.peak)}"
    yield f"  collectives of rank {most.rank} in a training iteration, in order:"
    yield from (f"    {line}" for line in _in_order(most.collectives))
    yield "  the host waits in optimizer.step():"
    yield from (f"    {line}" for line in _waits(reports))


_HEADER = (
    *("rank", "launches", "Muon's", "NCCL's", "sent", "messages", "host waits", "state", "peak"),
    *("connects to", "looked at as"),
)


def _table(reports: Sequence[RankReport]) -> list[str]:
    shown = reports if len(reports) <= 16 else _extremes(reports)
    rows = [_HEADER, *(_row(report) for report in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    last = len(_HEADER) - 1
    return [
        "  ".join(
            cell if at == last else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _extremes(reports: Sequence[RankReport]) -> list[RankReport]:
    """The first of many ranks, the last, and the one with most of each figure."""
    most = [
        dataclasses.replace(max(reports, key=key), reason=f"most {name} of all")
        for name, key in (
            ("launches", lambda report: report.launches),
            ("sent", lambda report: report.sent),
            ("memory", lambda report: report.state_bytes + report.peak_bytes),
            ("connections", lambda report: report.connections),
        )
    ]
    first, last = (dataclasses.replace(reports[at], reason=name) for at, name in _ENDS)
    return [first, *most, last]


_ENDS = ((0, "first"), (-1, "last"))


def _row(report: RankReport) -> tuple[str, ...]:
    step = [one for one in report.collectives if one.phase not in _OUTSIDE]
    return (
        str(report.rank),
        f"{report.launches:,}",
        f"{report.muon_launches:,}",
        str(sum(one.count for one in step)),
        f"{report.sent / MIB:,.1f}",
        str(report.messages),
        str(sum(wait.count for wait in report.host_waits)),
        f"{report.state_bytes / MIB:,.0f}",
        f"{report.peak_bytes / MIB:,.1f}",
        str(report.connections),
        report.reason,
    )


_OUTSIDE = ("zero", "forward", "backward")


def _bytes_by_kind(by_kind: dict[str, int]) -> str:
    parts = [f"{kind} {nbytes / MIB:,.1f}" for kind, nbytes in by_kind.items()]
    return ", ".join(parts) or "nothing"


def _in_order(collectives: Sequence[Launches]) -> Iterator[str]:
    if not collectives:
        yield "none"
    for one in collectives:
        times = f"{one.count} x " if one.count > 1 else ""
        waits = "" if one.asynchronous else ", its stream waits"
        yield (
            f"{one.phase or 'no phase'}: {times}{' or '.join(one.kinds)} over {one.size} ranks "
            f"({one.group}), reads {_nbytes(one.read)}, writes {_nbytes(one.written)}{waits}"
        )


def _nbytes(nbytes: int) -> str:
    return f"{nbytes / MIB:,.1f} MiB" if nbytes >= MIB // 10 else f"{nbytes:,} B"


def _waits(reports: Sequence[RankReport]) -> Iterator[str]:
    by_line: dict[HostWaits, list[int]] = {}
    for report in reports:
        for wait in report.host_waits:
            by_line.setdefault(wait, []).append(report.rank)
    if not by_line:
        yield "nowhere"
    for wait, ranks in by_line.items():
        times = "once" if wait.count == 1 else f"{wait.count} times"
        who = "every rank" if len(ranks) == len(reports) else f"rank {_list(ranks)}"
        yield f"{wait.name}, {times}, at {wait.place} ({wait.phase or 'no phase'}); {who}"


def _verdict(claims: Sequence[Claim]) -> Iterator[str]:
    for claim in claims:
        word = "FAIL" if claim.faults else "ok  " if claim.was_made else "--  "
        looked_at = claim.looked_at or f"not looked at, since {claim.reason}"
        yield f"  {word} {claim.name}: {looked_at}"
        for fault in claim.faults[:_FAULTS]:
            yield f"         {fault}"
        if len(claim.faults) > _FAULTS:
            yield f"         and {len(claim.faults) - _FAULTS} more (--json has them)"


def _sampled(certificate: Certificate) -> Iterator[str]:
    for kind in certificate.kinds:
        looked = "all" if kind.is_whole else str(len(kind.chosen))
        yield f"{kind.name} stage: {looked} of {len(kind.members)} ranks of stage {kind.stages[0]}"
        if len(kind.stages) > 1:
            yield f"  stages {_list(kind.stages[1:])} are taken to do the same"
    whole = [name for name, (seen, size) in certificate.compared.items() if seen == size]
    yield f"{len(whole)} of {len(certificate.compared)} process groups: every member is compared"
    for name, (seen, size) in certificate.compared.items():
        if seen < size and size == max(each for _, each in certificate.compared.values()):
            yield f"group {name.removesuffix(' #0')}: {seen} of {size} members are compared"
    alone = sum(seen == 1 < size for seen, size in certificate.compared.values())
    if alone:
        yield f"{alone} group(s): one member was looked at, so it is compared with none"


def _list(numbers: Sequence[int]) -> str:
    """``0, 3-5``."""
    parts: list[str] = []
    start = before = None
    for number in [*sorted(numbers), None]:
        if before is not None and number != before + 1:
            parts.append(str(start) if start == before else f"{start}-{before}")
            start = None
        start, before = (number if start is None else start), number
    return ", ".join(parts)
