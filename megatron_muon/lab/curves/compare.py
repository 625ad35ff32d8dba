"""Curves of several runs beside those of the first one, as figures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_muon.lab.curves import lead
from megatron_muon.lab.curves.files import KINDS, CurveError
from megatron_muon.lab.curves.lead import Curve

# by name a curve of each kind for each seed
_Runs = Mapping[str, Sequence[Mapping[str, Curve]]]


def compare(runs: _Runs, window: float | None) -> dict[str, Any]:
    """All figures beside the first run, by kind of loss; a CurveError if none is in all
    files.
    """
    every = itertools.chain(*runs.values())
    kinds = set(KINDS).intersection(*every)
    if not kinds:
        have = (
            f"{name}: {', '.join(sorted(set().union(*seeds)))}"
            for name, seeds in runs.items()
        )
        raise CurveError(f"no kind of loss is in all files ({'; '.join(have)})")
    found = {}
    for kind in sorted(kinds, key=KINDS.index):
        part = window
        if part is None:
            part = 0.02 if kind == "train" else 0.0
        curves = {name: [seed[kind] for seed in seeds] for name, seeds in runs.items()}
        first = next(iter(runs))
        found[kind] = {
            "window": part,
            "runs": [_ending(name, own, part) for name, own in curves.items()],
            "beside_first": [
                {"name": name, "leads": _leads(curves[first], own, part)}
                for name, own in curves.items()
                if name != first
            ],
        }
    return found


def _ending(name: str, curves: Sequence[Curve], window: float) -> dict[str, Any]:
    ends = [lead.envelope(lead.smooth(own, window)).losses[-1] for own in curves]
    return {
        "name": name,
        "steps": float(min(own.steps[-1] for own in curves)),
        "losses": [float(end) for end in ends],
        "dropped": sum(own.dropped for own in curves),
    }


def _leads(
    first: Sequence[Curve], own: Sequence[Curve], window: float
) -> list[dict[str, Any]]:
    leads = lead.leads(first, own, window)
    return [each._asdict() | {"ratio": each.ratio} for each in leads]
