"""Sizes and norms of the tensors in a checkpoint's files, and state dicts without tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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
PADDING = 63  # most elements of padding: in a grad buffer parameters start at multiples of 64
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
        shape: shape on disk.
        dtype: dtype on disk.
        numel: number of elements in the files.
        square: sum of their squares, in float64; not finite if an element is not.
        files: paths of the files, relative to the checkpoint.
    """

    kind: Kind
    key: str
    name: str | None
    part: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int = 0
    square: float = 0.0
    files: set[str] = field(default_factory=set)

    def add(self, tensor: torch.Tensor, file: str, *, may_be_padding: bool = False) -> None:
        """Add a piece. Padding counts as elements only: its values are arbitrary."""
        self.numel += tensor.numel()
        self.files.add(file)
        if may_be_padding and tensor.numel() <= PADDING:
            return
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            if tensor.element_size() == 1:  # fp8, for which torch has no norm
                tensor = tensor.float()
            norm = torch.linalg.vector_norm(tensor, dtype=torch.float64).item()
            self.square += norm * norm  # inf, where norm**2 raises OverflowError


@dataclass
class Contents:
    """The contents of a checkpoint's files.

    Attributes:
        format: ``torch`` or ``torch_dist``.
        common: the first rank's values other than the model, such as the arguments.
        states: optimizers' state dicts without tensors: groups, and Muon's record.
        sharding: sharding types of the optimizer state in torch_dist.
        stored: entries by kind, key, name and part.
        faults: reasons why the checkpoint is not complete.
        keys: keys of tensors and objects in torch_dist.
        shifted: weights whose main parameters are those of others.
    """

    format: Literal["torch", "torch_dist"]
    common: dict[str, Any] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    sharding: set[str] = field(default_factory=set)
    stored: dict[tuple[Kind, str, str | None, str], Stored] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    keys: frozenset[str] = frozenset()
    shifted: list[str] = field(default_factory=list)

    def at(
        self, kind: Kind, key: str, name: str | None, part: str, shape: Any, dtype: torch.dtype
    ) -> Stored:
        """The entry with these values; a new one if there is none."""
        name = None if name is None else canonical(name)
        new = Stored(kind, key, name, part, tuple(shape), dtype)
        return self.stored.setdefault((kind, key, name, part), new)


def canonical(name: str) -> str:
    """One name for parameters with several names: fused norms, and experts in either class."""
    for module, fused in _FUSED:
        name = re.sub(rf"(^|\.){re.escape(module)}(weight|bias)$", rf"\g<1>{fused}\2", name)
    return _TE_EXPERT.sub(r".experts.local_experts.\2.\1.weight", name)


def items_of(value: Any, what: str) -> Iterable[tuple[Any, Any]]:
    """Keys and values of a dict.

    Raises:
        ValueError: ``value`` is no dict; names it by ``what``.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a {type(value).__name__}, not a dict")
    return value.items()


def add_buffers(contents: Contents, state: Any, part: str, file: str) -> None:
    """Add each grad buffer's flat tensors, and the tensors by parameter name in Muon's format.

    Raises:
        ValueError: ``state`` has another form.
    """
    for index, by_dtype in items_of(state, "the optimizer's state") if state is not None else ():
        for dtypes, buffer in items_of(by_dtype, "a buffer") if isinstance(index, int) else ():
            where = f"{part} buffer {index} {dtypes}"
            for key, value in items_of(buffer, "a buffer of a dtype"):
                if isinstance(value, torch.Tensor):
                    _add(contents, key, None, where, value, file)
            for name, tensors in items_of(buffer.get("state", {}), "a buffer's state"):
                for key, value in items_of(tensors, "a parameter's state"):
                    _add(contents, key, name, part, value, file)


def _add(contents: Contents, key: Any, name: Any, part: str, value: Any, file: str) -> None:
    if not isinstance(value, torch.Tensor) or not isinstance(name, str | None):
        raise ValueError(f"the state of a parameter has a {type(value).__name__}, not a tensor")
    if key not in KINDS:
        raise ValueError(f"the state of a parameter has {str(key)[:100]!r}, which none has here")
    contents.at(KINDS[key], key, name, part, value.shape, value.dtype).add(value, file)


def state_dicts(state: Any) -> list[dict[str, Any]]:
    """The state dict of each optimizer in a chain, without its tensors.

    Raises:
        ValueError: chains are nested too deep, or parameter groups or Muon's record are malformed.
    """
    every = [by_name(one) for one in states_of(state)]
    for one in every:
        _check_groups(one.get("optimizer", one))
        record = one.get(RECORD)
        if record is not None and not _is_settings(record):
            raise ValueError(f"Muon's record {RECORD!r} has no settings, or others than plain ones")
    return [{key: one[key] for key in one if key != "param_state"} for one in every]


def _check_groups(inner: Any) -> None:
    groups = inner.get("param_groups", []) if isinstance(inner, dict) else []
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, dict) for g in groups):
        raise ValueError("the optimizer's param_groups are no list of dicts")


def _is_settings(record: Any) -> bool:
    settings = record.get("settings") if isinstance(record, dict) else None
    return isinstance(settings, dict) and are_settings(settings)


def are_settings(settings: Mapping[Any, Any]) -> bool:
    """Whether settings are plain values by name, as in MuonConfig, with no long or deep lists."""
    return all(isinstance(k, str) and _is_setting(v, depth=2) for k, v in settings.items())


def _is_setting(value: Any, depth: int) -> bool:
    if isinstance(value, (list, tuple)):
        return depth > 0 and len(value) <= 100 and all(_is_setting(v, depth - 1) for v in value)
    return isinstance(value, (bool, int, float, str, type(None)))


def by_name(saved: Mapping[Any, Any]) -> dict[str, Any]:
    """The entries of a state dict whose key is a text."""
    return {key: value for key, value in saved.items() if isinstance(key, str)}


def within(name: str, contents: Contents, act: Callable[[], None]) -> None:
    """Call ``act``; if the file ``name`` is damaged, add a fault instead of raising."""
    try:
        act()
    except DAMAGE as error:
        contents.faults.append(f"{name} cannot be read: {said(error)}")


DAMAGE = (OSError, ValueError, RuntimeError)  # errors from a damaged file; torch raises the last


def said(error: BaseException) -> str:
    """The first line of an error, with its type unless it is a ValueError with a text."""
    line = next(iter(str(error).splitlines()), "")
    return line if isinstance(error, ValueError) and line else f"{type(error).__name__}: {line}"
