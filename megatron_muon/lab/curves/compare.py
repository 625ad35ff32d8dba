"""Curves of several runs beside those of the first one, as figures."""

from __future__ import annotations

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
    found = {}
    for kind in KINDS:
        if all(kind in seed for seeds in runs.values() for seed in seeds):
            part = window
            if part is None:
                part = 0.02 if kind == "train" else 0.0
            curves = {
                name: [seed[kind] for seed in seeds] for name, seeds in runs.items()
            }
            first, *others = curves.items()
            found[kind] = {
                "window": part,
                "runs": [_ending(name, own, part) for name, own in curves.items()],
                "beside_first": [
                    {"name": o[0], **_beside(first[1], o[1], part)} for o in others
                ],
            }
    if not found:
        have = (
            f"{name}: {', '.join(sorted(set().union(*own)))}"
            for name, own in runs.items()
        )
        raise CurveError(f"no kind of loss is in all files ({'; '.join(have)})")
    return found


def _ending(name: str, curves: Sequence[Curve], window: float) -> dict[str, Any]:
    losses = [
        float(lead.envelope(lead.smooth(own, window)).losses[-1]) for own in curves
    ]
    dropped = sum(own.dropped for own in curves)
    steps = min(own.steps[-1] for own in curves)
    return {"name": name, "steps": float(steps), "losses": losses, "dropped": dropped}


def _beside(
    first: Sequence[Curve], own: Sequence[Curve], window: float
) -> dict[str, Any]:
    leads = lead.leads(first, own, window)
    return {"leads": [each._asdict() | {"ratio": each.ratio} for each in leads]}
