"""Who wrote a checkpoint, and what it says of its optimizer: read as data, no communication."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_muon.mcore.checkpoint.buffers import RECORD
from megatron_muon.mcore.checkpoint.interop import foreign
from megatron_muon.mcore.checkpoint.read import load
from megatron_muon.mcore.checkpoint.torch_dist import METADATA, Metadata, common, read_metadata
from megatron_muon.mcore.load_check.files import entries

_OPTIMIZERS = re.compile(r"(chained_\d+\.)*optimizer\.")


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint's files say of its optimizer.

    Attributes:
        folder: the folder of one iteration.
        metadata: those of torch_dist; empty in other formats.
        states: the state dicts of a chain of optimizers, without what differs between ranks.
    """

    folder: Path
    metadata: Metadata
    states: list[dict[Any, Any]]

    @classmethod
    def of(cls, folder: str | Path) -> Saved:
        """Read a checkpoint.

        Args:
            folder: that of one iteration, or the one that ``dist_checkpointing.save`` was given.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: it is damaged; names the file.
        """
        folder = Path(folder)
        metadata = Metadata(folder)
        if (folder / METADATA).exists():
            with _naming(folder / METADATA):
                metadata = read_metadata(folder)
            with _naming(folder / "common.pt"):
                saved = common(metadata)
        else:
            file = min(folder.glob("mp_rank_*/model_optim_rng.pt"), default=None)
            if file is None:
                raise FileNotFoundError(f"{folder} has no checkpoint in it")
            with _naming(file):
                saved = load(file)
                if not isinstance(saved, dict):
                    raise ValueError(f"it holds a {type(saved).__name__}, not a dict")
        return cls(folder, metadata, foreign.states_of(saved.get("optimizer")))

    @property
    def writer(self) -> Literal["muon", "adamw", "none"]:
        """The optimizer whose state it has: this package's Muon, AdamW or another, or none."""
        if self.has():
            return "muon"
        return "adamw" if self.states or self._objects() else "none"

    @property
    def foreign_writer(self) -> foreign.Writer | None:
        """The other Muon that has written it, if any: see ``foreign``."""
        states = self.states
        if any(
            ".optimizer/" in key for key in self._objects()
        ):  # each model-parallel rank's groups
            states = [*states, {"optimizer": self.record("optimizer")}]
        files = [entry.name for entry in entries(self.folder)]
        return foreign.writer_of(self._objects(), states, files)

    def has(self, key: str = RECORD) -> bool:
        """Whether there is a ``record`` under this key."""
        beside = any(key in state for state in self.states)
        return beside or any(f".{key}/" in name for name in self._objects())

    def record(self, key: str = RECORD) -> dict[str, Any]:
        """The dict saved under a key beside the optimizer's groups; Muon's settings by default.

        Raises:
            KeyError: the checkpoint has nothing under that key.
            ValueError: it is damaged; names the file or the key.
        """
        found = next((state[key] for state in self.states if key in state), None)
        if found is None:
            name = next((name for name in self._objects() if f".{key}/" in name), None)
            if name is None:
                raise KeyError(f"{self.folder} has no {key}")
            with _naming(self.folder / name):
                found = self.metadata.object(name)
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise ValueError(f"{self.folder}: {key} is damaged: it is a {type(found).__name__}")
        return found

    def _objects(self) -> list[str]:
        """The optimizer's keys in torch_dist."""
        return [key for key in self.metadata.keys if _OPTIMIZERS.match(key)]


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Add the file's path to errors about its damaged content."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
