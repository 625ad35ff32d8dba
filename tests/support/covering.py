"""A pairwise covering set of changes of topology between a save and a load.

In each format any two values of two different sizes (TP, PP, DP, EP, CP of the run that
saves and of the one that loads) are in one change together; so are, in some format, any
two that have to do with the model, buckets, chunks or instances. What no legal change
has is left out.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from support.checkpoints.saving import RESHARDABLE, formats
from support.installed import VERSION, lacks
from support.runs.cases import Case, Topology

DENSE = Case(steps=4, layers=4)
MOE = replace(DENSE, moe=True)
CASES = {
    "dense": DENSE,
    "tied": replace(DENSE, tied=True),
    "gated": replace(DENSE, gated=True, faster=("*.linear_fc2.*", "embedding.*")),
    "mla": replace(DENSE, mla="column"),
    "experts": MOE,
    # before core 0.15 fully_sharded_model_space cannot load gated ones that are cut,
    # AdamW's too
    "grouped": replace(MOE, grouped="legacy", gated=VERSION >= (0, 15), layers=2),
}
SMALLER = 20_000  # elements of a bucket: fewer buckets than with ``Topology``'s own
MOST_SAVING, MOST_LOADING = 4, 8  # ranks
CANDIDATES, SMALL = 1_500, 12


@dataclass(frozen=True)
class Change:
    """What is saved at one topology and loaded at another."""

    case: str
    format: str
    saved: Topology
    loaded: Topology

    def __str__(self) -> str:
        return f"{self.format}-{self.case}-{self.saved}-to-{self.loaded}"

    def pairs(self) -> set[tuple[str, ...]]:
        """What it shows: pairs of values of factors, those of sizes with the format."""
        sizes, others = [], [f"format {self.format}", f"case {self.case}"]
        for run, topology in (("saved", self.saved), ("loaded", self.loaded)):
            for name in ("tp", "pp", "dp", "ep", "cp"):
                sizes.append(f"{run} {name} {getattr(topology, name)}")
            for name in ("chunks", "instances"):
                others.append(f"{run} {name} {getattr(topology, name)}")
            others.append(f"{run} buckets {topology.overlap} {topology.bucket_size}")
        shown = {(self.format, *pair) for pair in itertools.combinations(sizes, 2)}
        return shown | set(itertools.combinations([*sizes, *others], 2))


def is_legal(change: Change) -> bool:
    """Whether the format can do it: what it can for AdamW, and more (EP 1 to more,
    buckets).
    """
    case, saved, loaded = CASES[change.case], change.saved, change.loaded
    if (
        saved == loaded
        or saved.world_size > MOST_SAVING
        or loaded.world_size > MOST_LOADING
    ):
        return False
    if not all(_is_possible(case, topology) for topology in (saved, loaded)):
        return False
    if change.format == RESHARDABLE:
        return VERSION >= (0, 14) or (saved.ep == 1) == (loaded.ep == 1)
    if (
        change.format == "dp_zero_gather_scatter"
        and max(saved.instances, loaded.instances) > 1
    ):
        return False
    if change.format == "dp_reshardable" and not all(
        map(_fills(case), (saved, loaded))
    ):
        return False
    kept = "tp pp ep chunks".split()
    kept += ["overlap", "bucket_size"] * (change.format == "dp_reshardable")
    return all(getattr(saved, name) == getattr(loaded, name) for name in kept)


def _fills(case: Case) -> Callable[[Topology], bool]:
    """Whether every rank has a piece of every bucket: the small ones of tied
    embeddings, which Megatron puts into a bucket of their own, have 224 elements and
    are padded to a multiple.
    """
    return lambda t: (
        not (case.tied and t.overlap) or t.dp * t.cp // t.instances in (1, 2, 4)
    )


def _is_possible(case: Case, topology: Topology) -> bool:
    ranks = topology.dp * topology.cp
    if (topology.ep > 1 and not case.moe) or ranks % topology.ep:
        return False
    if topology.chunks > 1 and (topology.pp == 1 or case.layers % 4):
        return False
    if topology.instances > 1 and (ranks // topology.ep) % topology.instances:
        return False
    if case.moe and topology.tp > 1 and not topology.sequence_parallel:
        return False
    return lacks(case, topology) is None


def _topology(pick: random.Random, moe: bool) -> Topology:
    tp = pick.choice((1, 2))
    overlap, bucket_size = pick.choice(((False, 5_000), (True, 5_000), (True, SMALLER)))
    return Topology(
        tp=tp,
        pp=pick.choice((1, 2)),
        dp=pick.choice((1, 2, 3, 4)),
        cp=pick.choice((1, 1, 2)),
        ep=pick.choice((1, 2)) if moe else 1,
        chunks=pick.choice((1, 1, 2)),
        instances=pick.choice((1, 1, 2)),
        overlap=overlap,
        bucket_size=bucket_size,
        sequence_parallel=moe and tp > 1,
    )


def _candidates(pick: random.Random) -> Iterator[Change]:
    """Legal changes without end."""
    while True:
        case = pick.choice(tuple(CASES))
        format = pick.choice(formats())
        saved = _topology(pick, CASES[case].moe)
        loaded = _topology(pick, CASES[case].moe)
        if format != RESHARDABLE:
            loaded = replace(
                loaded, tp=saved.tp, pp=saved.pp, ep=saved.ep, chunks=saved.chunks
            )
            loaded = replace(loaded, sequence_parallel=saved.sequence_parallel)
        if format == "dp_reshardable":
            loaded = replace(
                loaded, overlap=saved.overlap, bucket_size=saved.bucket_size
            )
        change = Change(case, format, saved, loaded)
        if is_legal(change):
            yield change


@cache
def covering_set() -> tuple[Change, ...]:
    """The set, the changes that show most first; the same in each call and process."""
    pool = list(itertools.islice(_candidates(random.Random(VERSION[1])), CANDIDATES))
    return _greedy(pool)


@cache
def small_set() -> tuple[Change, ...]:
    """Those ``SMALL`` of the set with few ranks that show most."""
    few = [
        change for change in covering_set() if change.loaded.world_size <= MOST_SAVING
    ]
    return _greedy(few)[:SMALL]


def _greedy(pool: Sequence[Change]) -> tuple[Change, ...]:
    """Changes that show all that the pool does, one after another by what each adds."""
    number: dict[object, int] = {}
    shown = {  # as bits
        change: sum(
            1 << number.setdefault(pair, len(number)) for pair in change.pairs()
        )
        for change in pool
    }
    missing = (1 << len(number)) - 1
    chosen: list[Change] = []
    saves: set[object] = set()
    while missing:
        best = max(
            shown, key=lambda c: ((shown[c] & missing).bit_count(), _save(c) in saves)
        )
        chosen.append(best)
        missing &= ~shown[best]
        saves.add(_save(best))
    return tuple(chosen)


def _save(change: Change) -> object:
    return change.case, change.format, change.saved
