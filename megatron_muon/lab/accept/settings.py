"""The settings of a call of ``accept``, which every check gets."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal

DeviceName = Literal["cuda", "cpu", "virtual"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that a result depends on: with others it is not used again.

    Attributes:
        device: ``cuda``, ``cpu``, or ``virtual``: the branches of a GPU on one that is not there.
        ranks: number of ranks, each with a GPU on ``cuda``.
        hardware: hardware of the predicted times: a preset's name, or a file.
        changes: ``NAME=VALUE`` for other constants of it.
    """

    device: DeviceName
    ranks: int
    hardware: str = "h100"
    changes: tuple[str, ...] = ()

    @property
    def gpus(self) -> bool:
        """Whether ranks have GPUs."""
        return self.device == "cuda"

    @property
    def why_no_gpu(self) -> str:
        """Why a part that needs a GPU is not run."""
        return "no GPU" if self.device == "cpu" else "the virtual GPU computes and times nothing"

    def as_json(self) -> str:
        """JSON for ``from_json``."""
        return json.dumps(dataclasses.asdict(self))


def from_json(text: str) -> Settings:
    """The reverse of ``Settings.as_json``, which another process of this command called."""
    given = json.loads(text)
    return Settings(**(given | {"changes": tuple(given["changes"])}))
