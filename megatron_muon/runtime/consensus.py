"""Comparisons before the first step, so that a disagreement is an error and not a
hang.
"""

from __future__ import annotations

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


_NEEDED = (
    "All ranks need the same flags (MuonConfig, OptimizerConfig and "
    "DistributedDataParallelConfig) and one version of each package; unless "
    f"{named('ns_iteration')} is 'standard', the same kind of device, and on GPUs "
    "quack-kernels on all of them or on none, too. Those of a pipeline stage need the "
    "same model and the same trainable parameters."
)
_LINE = 120  # characters of an error up to which two values share a line
# what the first rank to come leaves in the store if it asks the plugin for anything
_ASKS = "asks"


class PlanMismatchError(MuonError, RuntimeError):
    """Ranks have different settings, or those of a stage would not make the same
    exchange plan.
    """


def agree(
    lines: Sequence[str],
    group: Group | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise an error on every rank of the group if two ranks have different lines.

    Args:
        lines: of a name and a value, ``setting momentum: 0.95``.
        group, device: None is the world; the current GPU.

    Raises:
        PlanMismatchError: on every rank; names the first line that differs, with the
            values and ranks of the world.
    """
    number = int.from_bytes(fingerprint(lines)[:8], "big", signed=True)
    every = collectives.all_gather_numbers([number], group, _or_current(device))
    if any(numbers != [number] for numbers in every):
        texts = collectives.all_gather_json("\n".join(lines), group)
        ranks = (collectives.world_rank(rank, group) for rank in range(len(texts)))
        raise _difference(dict(zip(ranks, texts, strict=True)))


# How many times this process has compared settings, by the world in which it did.
_compared: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()


def agree_on_settings(settings: Sequence[str], *, asks: bool) -> None:
    """``agree`` of all ranks of the world, without a wait in AdamW's runs.

    These stay Megatron's: a rank that asks nothing of the plugin neither waits nor
    communicates, unless one that asks came before it. The first rank to come leaves in
    torch's store whether it asks. Where it did not, a rank that asks raises alone, and
    ends the others with its process.

    Raises:
        PlanMismatchError: see ``agree``.
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
        agree(settings)
    elif asks:
        other, _, theirs = first.partition("\n")
        raise _difference({int(other): theirs, rank: text})


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


def together(
    act: Callable[[], T],
    group: Group | None = None,
    device: torch.device | None = None,
) -> T:
    """The result of ``act`` on every rank of the group; an error on one rank stops all
    of them.

    ``act`` does not communicate, since the other ranks may be at the vote already. For
    what is raised see ``raise_together``.

    Args:
        group, device: None is the world; the current GPU.
    """
    result, error = attempt(act)
    raise_together(error, group, device)
    return result  # type: ignore[return-value]


def gathered(act: Callable[[], T]) -> list[T]:
    """Every rank's result of ``act`` over the world, as JSON gives it back; for errors
    see ``together``.
    """
    return collectives.all_gather_json(together(act), None)


def by_rank_0(act: Callable[[], T]) -> T:
    """Rank 0's result of ``act`` on all ranks of the world, as JSON gives it back; for
    errors see ``together``.
    """
    result, *_ = gathered(lambda: act() if dist.get_rank() == 0 else None)
    return result  # type: ignore[return-value]


def raise_together(
    error: BaseException | None,
    group: Group | None = None,
    device: torch.device | None = None,
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
    flag = torch.tensor(error is not None, device=_or_current(device))
    try:
        if collectives.any_rank("muon/agree", flag, group):
            raise_quoting(error, group)
    except collectives.PhaseError as lost:
        if error is None:
            raise
        raise error from lost  # it says more than that others do not answer


def _or_current(device: torch.device | None) -> torch.device:
    return device or torch.device(torch.cuda.current_device())


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


def _difference(texts: Mapping[int, str]) -> PlanMismatchError:
    """The error about lines by rank that are not all alike, the same everywhere."""
    (first, reference), *others = texts.items()
    for rank, text in others:
        for theirs, ours in itertools.zip_longest(
            text.split("\n"), reference.split("\n")
        ):
            if theirs != ours:
                both = _both((rank, theirs), (first, ours))
                return PlanMismatchError(f"ranks disagree, first at {both}\n{_NEEDED}")
    raise AssertionError("fingerprints differ but lines do not")


def _both(theirs: tuple[int, str | None], ours: tuple[int, str | None]) -> str:
    """``setting ns_steps: rank 1 has 6 where rank 0 has 5``; None: lines have ended."""
    name = (ours[1] or theirs[1] or "").split(": ", 1)[0]
    lines = (theirs[1], ours[1])
    values = [
        "nothing more" if x is None else x.removeprefix(f"{name}: ") for x in lines
    ]
    one, other = f"{name}: rank {theirs[0]} has", f"where rank {ours[0]} has"
    text = f"{one} {values[0]} {other} {values[1]}"
    return (
        text if len(text) <= _LINE else f"{one}\n  {values[0]}\n{other}\n  {values[1]}"
    )
