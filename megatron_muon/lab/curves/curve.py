"""A loss over the steps of one run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["train", "validation", "other"]
KINDS: tuple[Kind, ...] = ("train", "validation", "other")  # other: text from elsewhere
Points = tuple[tuple[float, float], ...]


class CurveError(ValueError):
    """A file holds no loss curve that can be read; the text names the file."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A loss over steps, in ascending order of the steps.

    Attributes:
        name: the loss's name in the file.
        points: (step, loss); each loss is finite.
        dropped: how many losses of the file were not finite.
    """

    name: str
    points: Points
    dropped: int = 0

    @property
    def last_step(self) -> float:
        """The last step that has a loss."""
        return self.points[-1][0]


def curve(name: str, points: Iterable[tuple[float, float]]) -> Curve | None:
    """Order the points of a file; a step that is there twice has its last loss.

    A run that was resumed from a checkpoint writes the steps after the checkpoint again.

    Args:
        name: the loss's name.
        points: (step, loss) in the order of the file.

    Returns:
        The curve; None without a finite loss.
    """
    losses: dict[float, float] = {}
    dropped = 0
    for step, loss in points:
        if math.isfinite(step) and math.isfinite(loss):
            losses.pop(step, None)
            losses[step] = loss
        else:
            dropped += 1
    return Curve(name, tuple(sorted(losses.items())), dropped) if losses else None


def kind_of(name: str) -> Kind | None:
    """Which loss a name means, by the words that Megatron, W&B and the quickstart use for it.

    Args:
        name: a tag, a column or a key, such as ``lm loss validation``.

    Returns:
        Its kind; None for what is no loss over steps, such as ``lm loss validation ppl``.
    """
    words = "".join(letter if letter.isalnum() else " " for letter in name.lower()).split()
    if {"ppl", "perplexity", "vs", "scale", "scaling", "aux", "load", "balancing"} & set(words):
        return None
    if {"ood", "other"} & set(words) or name.lower().startswith("out-of-distribution"):
        return "other"
    if {"validation", "valid", "val", "eval", "evaluation", "test"} & set(words):
        return "validation"
    return "train" if {"loss", "train", "training"} & set(words) else None
