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
            "runs": [_ending(name, seeds, part) for name, seeds in curves.items()],
            "beside_first": [
                {"name": name, "leads": _leads(curves[first], seeds, part)}
                for name, seeds in curves.items()
                if name != first
            ],
        }
    return found


def _ending(name: str, curves: Sequence[Curve], window: float) -> dict[str, Any]:
    ends = [lead.envelope(lead.smooth(curve, window)).losses[-1] for curve in curves]
    return {
        "name": name,
        "steps": float(min(curve.steps[-1] for curve in curves)),
        "losses": [float(end) for end in ends],
        "dropped": sum(curve.dropped for curve in curves),
    }


def _leads(
    first: Sequence[Curve], seeds: Sequence[Curve], window: float
) -> list[dict[str, Any]]:
    leads = lead.leads(first, seeds, window)
    return [each._asdict() | {"ratio": each.ratio} for each in leads]
