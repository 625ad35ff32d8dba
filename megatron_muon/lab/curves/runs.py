"""The runs of a comparison: each one loss curve of each kind for each of its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_muon.lab.curves.curve import KINDS, Curve, CurveError, Kind, Points, curve, kind_of
from megatron_muon.lab.curves.tensorboard_files import has_events, read_events
from megatron_muon.lab.curves.text_files import read_text


@dataclass(frozen=True, slots=True)
class Run:
    """A run, repeated with several seeds or not.

    Attributes:
        name: the name it is shown by.
        seeds: for each repetition its curves by kind.
    """

    name: str
    seeds: tuple[Mapping[Kind, Curve], ...]

    def curves(self, kind: Kind) -> list[Curve] | None:
        """The curve of each seed; None where a seed has none of that kind."""
        curves = [seed[kind] for seed in self.seeds if kind in seed]
        return curves if len(curves) == len(self.seeds) else None


def read_run(name: str, paths: Sequence[Path], tags: Mapping[Kind, str]) -> Run:
    """Read a run's files.

    Args:
        name: the run's name.
        paths: a file or a folder for each seed.
        tags: names that a loss has in the files, where they do not tell by themselves.

    Raises:
        CurveError: a file has no loss, or several of one kind.
    """
    return Run(name, tuple(_curves(path, tags) for path in paths))


def _curves(path: Path, tags: Mapping[Kind, str]) -> dict[Kind, Curve]:
    if not path.exists():
        raise CurveError(f"{path}: it does not exist")
    if path.is_dir() and not has_events(path):
        raise CurveError(f"{path}: no event file of TensorBoard's is in this folder")
    columns = read_events(path) if has_events(path) else read_text(path)
    by_kind: dict[Kind, Curve] = {}
    for kind in KINDS:
        name = tags.get(kind) or _only_name(path, kind, columns)
        if name is None:
            continue
        if name not in columns:
            raise CurveError(f"{path}: it has no {name!r}, but {_listed(columns)}")
        loss = curve(name, columns[name])
        if loss is not None and loss.last_step > 0:  # a loss before training alone is no curve
            by_kind[kind] = loss
    if not by_kind:
        raise CurveError(f"{path}: no loss among {_listed(columns)}; name one with --tag KIND=NAME")
    return by_kind


def _only_name(path: Path, kind: Kind, columns: Mapping[str, Points]) -> str | None:
    names = [name for name in columns if kind_of(name) == kind]
    exact = [name for name in names if name in ("lm loss", "lm loss validation")]
    if len(names) > 1 and len(exact) != 1:
        raise CurveError(f"{path}: {_listed(names)} may be the {kind} loss; --tag {kind}=NAME says")
    return next(iter(exact or names), None)


def _listed(names: Mapping[str, Points] | Sequence[str]) -> str:
    shown = [repr(name[:80]) for name in names][:12]
    return ", ".join(shown) + (", …" if len(names) > len(shown) else "")
