"""Sizes of the tensors in a checkpoint's files, and state dicts without tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_muon.mcore.checkpoint.interop.foreign import states_of

Kind = Literal["model", "main", "momentum", "adamw"]
KINDS: dict[str, Kind] = {
    "param": "main",
    "fp32_param": "main",
    "muon_momentum": "momentum",
    "momentum_buffer": "momentum",  # Megatron's own Muon
    "exp_avg": "adamw",
    "exp_avg_sq": "adamw",
}
RECORD = "megatron_muon"
# Two names on disk for each norm: as its own module, and fused into the linear after it.
_FUSED = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)
_TE_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")


@dataclass(slots=True)
class Stored:
    """All elements that one group of ranks has saved of one parameter, of one kind.

    Attributes:
        kind: the weight in the model, the main parameter, Muon's momentum or AdamW's moments.
        key: name of the tensor on disk, such as ``exp_avg``.
        name: the parameter's name, with layers and experts numbered; None where one tensor holds
            several parameters.
        part: the group of ranks that saved it; empty where they saved the whole parameter.
        shape, dtype: those on disk.
        numel: number of elements in the files.
        files: paths of the files, relative to the checkpoint.
    """

    kind: Kind
    key: str
    name: str | None
    part: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int = 0
    files: set[str] = field(default_factory=set)

    def add(self, numel: int, file: str) -> None:
        """Add a piece."""
        self.numel += numel
        self.files.add(file)


@dataclass
class Contents:
    """The contents of a checkpoint's files.

    Attributes:
        folder: the folder of one iteration.
        format: ``torch`` or ``torch_dist``.
        common: the first rank's values other than the model, such as the arguments.
        states: optimizers' state dicts without tensors: groups, and Muon's record.
        stored: entries by kind, key, name and part.
        faults: reasons why the checkpoint is not complete.
        keys: keys of tensors and objects in torch_dist.
    """

    folder: Path
    format: Literal["torch", "torch_dist"]
    common: dict[str, Any] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    stored: dict[tuple[Kind, str, str | None, str], Stored] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    keys: frozenset[str] = frozenset()

    def at(
        self, kind: Kind, key: str, name: str | None, part: str, shape: Any, dtype: torch.dtype
    ) -> Stored:
        """The entry with these values; a new one if there is none."""
        name = None if name is None else canonical(name)
        new = Stored(kind, key, name, part, tuple(shape), dtype)
        return self.stored.setdefault((kind, key, name, part), new)

    def read(self, file: str, act: Callable[[], Any]) -> Any:
        """The result of ``act``; None where ``file`` cannot be read, which is noted as a fault.

        A damaged or crafted file may hold anything, so any error is the file's.
        """
        try:
            return act()
        except MemoryError:
            raise
        except Exception as error:
            line = next(iter(str(error).splitlines()), "")
            why = line if isinstance(error, ValueError) else f"{type(error).__name__}: {line}"
            self.faults.append(f"{file} cannot be read: {why}")
            return None

    def add_states(self, saved: Any) -> None:
        """Add the state dict of each optimizer in a chain, without its tensors."""
        for state in states_of(saved):
            kept = {k: v for k, v in state.items() if isinstance(k, str) and k != "param_state"}
            for group in kept.get("optimizer", kept).get("param_groups", ()):
                group.get("step")  # raises where a group is no dict
            if RECORD in kept:
                dict(kept[RECORD]["settings"])
            self.states.append(kept)

    def add_buffers(self, state: Any, part: str, file: str) -> None:
        """Add each grad buffer's flat tensors, and in Muon's format the tensors by name."""
        for index, by_dtype in (state or {}).items():
            for dtypes, buffer in by_dtype.items() if isinstance(index, int) else ():
                where = f"{part} buffer {index} {dtypes}"
                for key, value in buffer.items():
                    if isinstance(value, torch.Tensor):
                        self._add(key, None, where, value, file)
                for name, tensors in buffer.get("state", {}).items():
                    for key, value in tensors.items():
                        self._add(key, name, part, value, file)

    def _add(self, key: str, name: str | None, part: str, value: torch.Tensor, file: str) -> None:
        if key not in KINDS:
            raise ValueError(f"the state of a parameter has {str(key)[:100]!r}, which none has")
        self.at(KINDS[key], key, name, part, value.shape, value.dtype).add(value.numel(), file)


def canonical(name: str) -> str:
    """One name for parameters with several names: fused norms, and experts in either class."""
    for module, fused in _FUSED:
        name = re.sub(rf"(^|\.){re.escape(module)}(weight|bias)$", rf"\g<1>{fused}\2", name)
    return _TE_EXPERT.sub(r".experts.local_experts.\2.\1.weight", name)
