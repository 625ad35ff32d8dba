"""Comparisons before the first step, so that a disagreement is an error and not a
hang.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from megatron_muon.planning.agreed import fingerprint
from megatron_muon.planning.grid import RankGrid
from megatron_muon.presence import MuonError
from megatron_muon.runtime import collectives
from megatron_muon.runtime.collectives import Group
from megatron_muon.settings.config import named

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place in its stage; for experts, in the stage's expert groups."""

    ep_rank: int
    ep_size: int
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int


@dataclass(frozen=True, slots=True)
class Subject:
    """What ranks compare, what the ranks are of, and what to do where they differ."""

    name: str
    whose: str
    way_out: str


_NEEDED = (
    "All ranks of a stage need the same model, the same trainable parameters and the "
    f"same MuonConfig; unless {named('ns_iteration')} is 'standard', the same kind of "
    "device, and on GPUs quack-kernels on all of them or on none, too."
)
PLAN = Subject("the exchange plan", "the run", _NEEDED)
PLAN_OF_STAGE = Subject("the exchange plan", "one pipeline stage", _NEEDED)
SETTINGS = Subject(
    "its settings",
    "the run",
    "All ranks need the same flags (MuonConfig, OptimizerConfig and "
    "DistributedDataParallelConfig), and one version of each package.",
)
_LINE = 120  # characters of an error up to which two values share a line
# what the first rank to come leaves in the store if it asks the plugin for anything
_ASKS = "asks"


class PlanMismatchError(MuonError, RuntimeError):
    """Ranks have different settings, or those of a stage would not make the same
    exchange plan.
    """


# How many times this process has compared settings, by the world in which it did.
_compared: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()


def agree_on_settings(
    settings: Sequence[str], *, asks: bool, device: Callable[[], torch.device]
) -> None:
    """Raise an error on every rank of the world if two ranks have different settings.

    AdamW's runs stay Megatron's: a rank that asks nothing of the plugin neither waits
    nor communicates, unless one that asks came before it. The first rank to come leaves
    in torch's store whether it asks. Where it did not, a rank that asks raises alone,
    and ends the others with its process.

    Raises:
        PlanMismatchError: names the first setting that differs, with the values and
            ranks.
    """
    if (
        not dist.is_initialized()
        or dist.get_world_size() == 1
        or dist.get_backend() == "fake"
    ):
        return  # nobody else is there
    deterministic = torch.are_deterministic_algorithms_enabled()
    settings = [
        *settings,
        f"torch's deterministic mode: {deterministic}",
        f"asks anything of megatron-muon: {asks}",
    ]
    text = "\n".join(settings)
    rank = dist.get_rank()
    first = _first_to_come(_ASKS if asks else f"{rank}\n{text}")
    if first == _ASKS:
        agree_everywhere(settings, device(), SETTINGS)
    elif asks:
        other, _, theirs = first.partition("\n")
        raise PlanMismatchError(
            _first_difference({int(other): theirs, rank: text}, SETTINGS)
        )


def _first_to_come(mine: str) -> str:
    """What the first rank to come here left; ``mine``, which is left there, if this is
    the first.

    It is no collective, and waits for no other rank.
    """
    world: Any = dist.group.WORLD
    _compared[world] = number = _compared.get(world, 0) + 1
    store: Any = dist.distributed_c10d._get_default_store()
    if store is None:  # as over MPI
        return mine
    return str(store.compare_set(f"megatron_muon/settings/{number}", "", mine).decode())


def agree_on_grid(
    coordinates: Coordinates,
    description: Sequence[str],
    group: Group,
    device: torch.device,
    near: int,
) -> RankGrid:
    """The stage's ranks by their coordinates, once all of them describe the same plan.

    Args:
        coordinates, near: this rank's coordinates; ``RankGrid.neighbours``.
        description: the plan's inputs, one per line (``agreed.description``).
        group, device: the stage's group, and the device that it communicates from.

    Raises:
        PlanMismatchError: on every rank of the stage; names the first line that
            differs.
    """
    mine = [*dataclasses.astuple(coordinates), *_words(description)]
    every = collectives.all_gather_numbers(mine, group, device)
    if any(numbers[-4:] != every[0][-4:] for numbers in every):
        texts = collectives.all_gather_json("\n".join(description), group)
        raise PlanMismatchError(
            _first_difference(dict(enumerate(texts)), PLAN_OF_STAGE)
        )
    return grid_of([Coordinates(*numbers[:-4]) for numbers in every], near)


def agree_everywhere(
    description: Sequence[str], device: torch.device, subject: Subject = PLAN
) -> None:
    """Raise an error on every rank of the world if two ranks have different
    descriptions.

    Raises:
        PlanMismatchError: on every rank; names the first line that differs.
    """
    every = collectives.all_gather_numbers(_words(description), None, device)
    if any(words != every[0] for words in every):
        texts = collectives.all_gather_json("\n".join(description), None)
        raise PlanMismatchError(_first_difference(dict(enumerate(texts)), subject))


def attempt(act: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """``(result of act, None)``, or ``(None, the error that it raises)``.

    It catches BaseException, since torch's CheckpointException is no Exception. Only
    exceptions that ask the process to end pass through.
    """
    try:
        return act(), None
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        return None, error


def together(act: Callable[[], T], group: Group | None, device: torch.device) -> T:
    """The result of ``act`` on every rank of the group; an error on one rank stops all
    of them.

    ``act`` does not communicate, since the other ranks may be at the vote already. For
    what is raised see ``raise_together``.
    """
    result, error = attempt(act)
    raise_together(error, group, device)
    return result  # type: ignore[return-value]


def raise_together(
    error: BaseException | None, group: Group | None, device: torch.device
) -> None:
    """Raise on every rank of the group if one has an error: its own, or one that quotes
    the first.

    Without a process group, or in one of a single rank, it does not communicate.

    Raises:
        BaseException: ``error`` where there is one.
        RuntimeError: on the other ranks; quotes the first error.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        if error is not None:
            raise error
        return
    flag = torch.tensor(error is not None, device=device)
    try:
        if collectives.any_rank("muon/agree", flag, group):
            raise_quoting(error, group)
    except collectives.PhaseError as lost:
        if error is None:
            raise
        raise error from lost  # it says more than that others do not answer


def raise_quoting(error: BaseException | None, group: Group | None) -> NoReturn:
    """``raise_together`` where at least one rank is known to have an error."""
    texts = collectives.all_gather_json("" if error is None else _text(error), group)
    if error is not None:
        raise error
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
    raise RuntimeError(
        f"rank {collectives.world_rank(rank, group)} stopped this run: {text}"
    )


def _text(error: BaseException) -> str:
    """The error's words, never empty; with its type where the words alone say little
    (KeyError).
    """
    words = str(error)
    worded = isinstance(error, (ValueError, RuntimeError, TypeError, OSError))
    return words if worded and words else f"{type(error).__name__}: {words}"


def grid_of(every: Sequence[Coordinates], near: int) -> RankGrid:
    """The ranks of a stage by the coordinates of ranks 0, 1, … of it.

    Raises:
        PlanMismatchError: a place has no rank, or more than one.
    """
    ep_size, tp_size, dp_size = every[0].ep_size, every[0].tp_size, every[0].dp_size
    ranks = {(c.ep_rank, c.tp_rank, c.dp_rank): rank for rank, c in enumerate(every)}
    wanted = list(itertools.product(range(ep_size), range(tp_size), range(dp_size)))
    if sorted(ranks) != wanted or len(every) != len(wanted):
        raise PlanMismatchError(
            f"the stage's group has {len(every)} ranks at (ep, tp, dp) "
            f"{sorted(ranks)}, but EP x TP x DP is {ep_size} x {tp_size} x {dp_size}: "
            "pass get_megatron_optimizer the process groups that the model was built "
            "with"
        )
    return RankGrid(
        tuple(
            tuple(
                tuple(ranks[ep, tp, dp] for dp in range(dp_size))
                for tp in range(tp_size)
            )
            for ep in range(ep_size)
        ),
        near,
    )


def _words(description: Sequence[str]) -> list[int]:
    """The fingerprint as four numbers."""
    whole = fingerprint(description)
    return [
        int.from_bytes(whole[i : i + 8], "big", signed=True) for i in (0, 8, 16, 24)
    ]


def _first_difference(texts: Mapping[int, str], subject: Subject) -> str:
    """The error's text about descriptions by rank that are not all alike, the same
    everywhere.
    """
    (first, reference), *others = texts.items()
    for rank, text in others:
        for theirs, ours in itertools.zip_longest(
            text.split("\n"), reference.split("\n")
        ):
            if theirs != ours:
                return (
                    f"ranks of {subject.whose} disagree about {subject.name}, first at "
                    f"{_both((rank, theirs), (first, ours), subject.whose)}"
                    f"\n{subject.way_out}"
                )
    raise AssertionError("fingerprints differ but descriptions do not")


def _both(
    theirs: tuple[int, str | None], ours: tuple[int, str | None], whose: str
) -> str:
    """``setting ns_steps: rank 1 of the run has 6 where rank 0 has 5``.

    A line is None where a description has ended.
    """
    name = (ours[1] or theirs[1] or "").split(": ", 1)[0]
    lines = (theirs[1], ours[1])
    values = [
        "nothing more" if x is None else x.removeprefix(f"{name}: ") for x in lines
    ]
    one, other = f"{name}: rank {theirs[0]} of {whose} has", f"where rank {ours[0]} has"
    text = f"{one} {values[0]} {other} {values[1]}"
    return (
        text if len(text) <= _LINE else f"{one}\n  {values[0]}\n{other}\n  {values[1]}"
    )
