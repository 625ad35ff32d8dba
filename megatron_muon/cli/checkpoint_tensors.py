"""Every tensor of a checkpoint, one at a time, from its files: no process group, no Megatron."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_muon.cli.checkpoint_pickle import load_pickle, load_torch
from megatron_muon.mcore.checkpoint_foreign import states_of

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
PADDING = 63  # elements at most: in a grad buffer a parameter starts at a multiple of 64
_CHAINED = r"(?:(?P<chained>chained_\d+)\.)?optimizer\."
_BY_NAME = re.compile(_CHAINED + r"distributed\.(?P<group>dp_group_idx_\d+)\.megatron_muon\.(.*)$")
_MODEL_SPACE = re.compile(_CHAINED + r"state\.(.*)$")
_BUCKET = re.compile(_CHAINED + r"distributed\.(?P<group>dp_group_idx_\d+)\.gbuf_.*\.(\w+)$")
_OBJECT = re.compile(_CHAINED + r"distributed\.(?P<group>dp_group_idx_\d+)\.(\w+)/shard_")
# What is not sharded: a file of its own, or from core 0.19 on an object among the tensors.
_COMMON_FILE, _COMMON = "common.pt", re.compile(r"common_state/shard_")
_STACK = re.compile(r"\.layers\.(?=\D)")
# What Megatron calls norms on disk, where they may be fused into the linear after them.
_FUSED = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)
_TE_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")


@dataclass(slots=True)
class Stored:
    """All that one group of ranks has saved of one parameter, of one kind.

    Attributes:
        kind: what it is of the parameter.
        key: what it is called on disk.
        name: the parameter's, with layers and experts numbered; None of a tensor that has several.
        part: which ranks' it is; empty where it is the whole parameter's.
        shape: on disk.
        numel: elements that were found in the files.
        square: sum of their squares, in float64; not finite if one of them is not.
        files: that have it, relative to the checkpoint.
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
        """Count a piece of it in; what stands between parameters has any value at all."""
        self.numel += tensor.numel()
        self.files.add(file)
        if may_be_padding and tensor.numel() <= PADDING:
            return
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            self.square += torch.linalg.vector_norm(tensor, dtype=torch.float64).item() ** 2


@dataclass
class Contents:
    """What the files of a checkpoint have in them.

    Attributes:
        format: ``torch`` or ``torch_dist``.
        common: what is not a tensor, of the first rank.
        states: optimizers' state dicts without tensors: groups, and Muon's record.
        sharding: types of torch_dist's optimizer state.
        stored: by kind, key, name and part.
        faults: why it is not complete.
        keys: of torch_dist.
    """

    format: Literal["torch", "torch_dist"]
    common: dict[str, Any] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    sharding: set[str] = field(default_factory=set)
    stored: dict[tuple[Kind, str, str | None, str], Stored] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    keys: frozenset[str] = frozenset()

    def at(
        self, kind: Kind, key: str, name: str | None, part: str, shape: Any, dtype: torch.dtype
    ) -> Stored:
        """The entry of these, made if there is none."""
        name = None if name is None else canonical(name)
        new = Stored(kind, key, name, part, tuple(shape), dtype)
        return self.stored.setdefault((kind, key, name, part), new)


def canonical(name: str) -> str:
    """One name for a parameter that goes by several: fused norms, and experts of each class."""
    for module, fused in _FUSED:
        name = re.sub(rf"(^|\.){re.escape(module)}(weight|bias)$", rf"\g<1>{fused}\2", name)
    return _TE_EXPERT.sub(r".experts.local_experts.\2.\1.weight", name)


def read(folder: Path) -> Contents:
    """Read all of a checkpoint.

    Args:
        folder: of one iteration.

    Raises:
        FileNotFoundError: there is no checkpoint in it.
    """
    if any(folder.glob("*.distcp")) or (folder / ".metadata").exists():
        return _torch_dist(folder)
    if any(_torch_files(folder)):
        return _torch(folder)
    raise FileNotFoundError(f"{folder} has no checkpoint in it")


# --- torch_dist -------------------------------------------------------------------------------


def _torch_dist(folder: Path) -> Contents:
    found = Contents("torch_dist")
    for name in ("metadata.json", ".metadata"):
        if not (folder / name).is_file():
            found.faults.append(f"{name} is missing")
    try:
        _common(found, load_torch(folder / _COMMON_FILE))
    except FileNotFoundError:
        pass
    except Exception as error:
        found.faults.append(f"{_COMMON_FILE} cannot be read: {_said(error)}")
    try:
        metadata = load_pickle(folder / ".metadata")
    except FileNotFoundError:
        return found
    except Exception as error:
        found.faults.append(f".metadata cannot be read: {_said(error)}")
        return found
    found.keys = frozenset(metadata.state_dict_metadata)
    in_a_file = (folder / _COMMON_FILE).is_file()
    if not in_a_file and not any(map(_COMMON.match, found.keys)):
        found.faults.append(f"{_COMMON_FILE} is missing")
    reader = _Reader(folder, metadata.storage_data, found)
    for key, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            _tensor(found, reader, key, described)
        elif _COMMON.match(key):
            if not in_a_file and (got := _object(reader, key)) is not None:
                _common(found, got[0])
        elif at := _OBJECT.match(key):
            _optimizer_object(found, reader, key, at)
    for state in found.states:
        found.sharding |= {state[k] for k in ("param_state_sharding_type",) if k in state}
    return found


def _common(found: Contents, common: dict[str, Any]) -> None:
    found.common = common
    found.states += _states(common.get("optimizer"))


@dataclass
class _Reader:
    folder: Path
    storage: dict[Any, Any]
    found: Contents
    broken: set[str] = field(default_factory=set)  # files of which a fault is noted

    def read(self, index: MetadataIndex) -> tuple[Any, str] | None:
        """What is saved there and its file; None after noting why it cannot be read."""
        at = self.storage.get(index)
        if at is None:
            self.found.faults.append(f".metadata does not say where {index.fqn} is")
            return None
        file = str(at.relative_path)
        try:
            with (self.folder / file).open("rb") as stream:
                stream.seek(at.offset)
                data = stream.read(at.length)
            if len(data) < at.length:
                raise EOFError(f"it ends {at.length - len(data)} bytes too early")
            return load_torch(io.BytesIO(data)), file
        except FileNotFoundError:
            self._note(file, f"{file} is missing; {index.fqn} is in it")
        except Exception as error:
            self._note(file, f"{file} cannot be read at {index.fqn}: {_said(error)}")
        return None

    def _note(self, file: str, fault: str) -> None:
        if file not in self.broken:
            self.broken.add(file)
            self.found.faults.append(fault)


def _place(key: str) -> tuple[Kind, str, str | None, str] | None:
    """Kind, key, name (of a stack, if it is one) and part of a tensor on disk."""
    if at := _BY_NAME.match(key):
        what, _, name = at[3].partition(".")
        return KINDS[what], what, name, f"{at['chained'] or ''} {at['group']}".strip()
    if at := _MODEL_SPACE.match(key):
        what, _, name = at[2].partition(".")
        return (KINDS[what], what, name, "") if what in KINDS else None
    if at := _BUCKET.match(key):
        part = f"{at['chained'] or ''} {at['group']}".strip()
        return KINDS.get(at[3], "main"), at[3], None, part
    return None if key.startswith(("optimizer.", "chained_")) else ("model", "weight", key, "")


def _tensor(found: Contents, reader: _Reader, key: str, described: Any) -> None:
    place = _place(key)
    if place is None:
        return
    kind, what, name, part = place
    size, dtype = tuple(described.size), described.properties.dtype
    axes = _stack_axes(name, size) if name is not None else 0
    seen = 0
    for chunk in described.chunks:
        got = reader.read(MetadataIndex(key, chunk.offsets))
        if got is None:
            continue
        tensor, file = got
        seen += tensor.numel()
        if tensor.dim() != len(size) or not axes:
            entry = found.at(kind, what, name, part, size, tensor.dtype)
            entry.add(tensor, file, may_be_padding=name is None)
            continue
        for index in product(*(range(n) for n in tensor.shape[:axes])):
            numbers = [at + offset for at, offset in zip(index, chunk.offsets, strict=False)]
            one = _unstacked(str(name), numbers)
            found.at(kind, what, one, part, size[axes:], tensor.dtype).add(tensor[index], file)
    if seen < prod(size) and not reader.broken:
        found.faults.append(f"{key} has {prod(size)} elements, only {seen} are in the files")
    if not described.chunks:
        found.at(kind, what, name, part, size, dtype)


def _stack_axes(name: str, size: tuple[int, ...]) -> int:
    axes = bool(_STACK.search(name)) + (".experts.experts." in name)
    return axes if len(size) > axes else 0


def _unstacked(name: str, numbers: list[int]) -> str:
    if _STACK.search(name):
        layer, *numbers = numbers
        name = _STACK.sub(f".layers.{layer}.", name, count=1)
    if ".experts.experts." in name:
        name = name.replace(".experts.experts.", f".experts.local_experts.{numbers[0]}.")
    return name


def _object(reader: _Reader, key: str) -> tuple[Any, str] | None:
    """What is no tensor, and its file."""
    got = reader.read(MetadataIndex(key))
    if got is None:
        return None
    value, file = got
    value = load_torch(value) if isinstance(value, io.BytesIO) else value
    return value[0] if isinstance(value, list) and len(value) == 1 else value, file


def _optimizer_object(found: Contents, reader: _Reader, key: str, at: re.Match[str]) -> None:
    """What ranks have saved as a whole: groups, Muon's record, and all of dp_zero's state."""
    if at[3] not in ("optimizer", RECORD, "param_state"):
        return
    got = _object(reader, key)
    if got is None:
        return
    value, file = got
    if at[3] == "param_state":
        part = f"{at['chained'] or ''} {at['group']}".strip()
        _buffers(found, value, part, file)
    else:
        found.states.append({at[3]: value})


# --- torch ------------------------------------------------------------------------------------


def _torch_files(folder: Path) -> list[tuple[Path, bool]]:
    """(file, whether it has the optimizer's tensors)."""
    files = sorted(folder.rglob("*.pt"))
    return [
        (file, "optim.pt" in file.name and "model" not in file.name)
        for file in files
        if re.search(r"(model_optim_rng|model_optim|distrib_optim|model_rng)\.pt$", file.name)
    ]


def _torch(folder: Path) -> Contents:
    found = Contents("torch")
    for file, has_tensors in _torch_files(folder):
        name = str(file.relative_to(folder))
        try:
            saved = load_torch(file, mmap=True)
            if has_tensors:
                states = saved if isinstance(saved, list) else [saved]
                for number, state in enumerate(states):
                    part = name if len(states) == 1 else f"{name} {number}"
                    _buffers(found, state, part, name)
            else:
                _model_file(found, saved, name)
        except Exception as error:
            found.faults.append(f"{name} cannot be read: {_said(error)}")
            continue
        pair = _pair(file) if has_tensors or _has_record(saved) else None
        if pair is not None and not pair[0]:
            found.faults.append(f"{name} has no {pair[1]} beside it, which is missing")
    return found


def _pair(file: Path) -> tuple[bool, str]:
    """Whether the other one of a rank's two files is there, and its name."""
    name = file.name
    if "distrib_optim" in name:
        others = [
            name.replace("distrib_optim", what) for what in ("model_optim_rng", "model_optim")
        ]
    else:
        others = [re.sub("model_optim(_rng)?", "distrib_optim", name)]
    return any(file.with_name(other).is_file() for other in others), " or ".join(others)


def _has_record(saved: Any) -> bool:
    """Whether it is of a rank on which Muon's DistributedOptimizer has state."""
    return any(RECORD in state for state in _states(saved.get("optimizer")))


def _model_file(found: Contents, saved: dict[str, Any], file: str) -> None:
    if not found.common:
        found.common = {key: saved[key] for key in saved if not str(key).startswith("model")}
    found.states += _states(saved.get("optimizer"))
    for chunk in (key for key in saved if re.fullmatch(r"model\d*", str(key))):
        for name, tensor in saved[chunk].items():
            if isinstance(tensor, torch.Tensor) and not name.endswith("_extra_state"):
                part = f"{file} {chunk}"
                found.at("model", "weight", name, part, tensor.shape, tensor.dtype).add(
                    tensor, file
                )


def _buffers(found: Contents, state: Any, part: str, file: str) -> None:
    """Flat tensors of each grad buffer, and by name what Muon's format has of each parameter."""
    for index, by_dtype in state.items() if isinstance(state, dict) else ():
        for dtypes, buffer in by_dtype.items() if isinstance(index, int) else ():
            for key, value in buffer.items():
                if isinstance(value, torch.Tensor):
                    where = f"{part} buffer {index} {dtypes}"
                    found.at(KINDS[key], key, None, where, value.shape, value.dtype).add(
                        value, file
                    )
            for name, tensors in buffer.get("state", {}).items():
                for key, value in tensors.items():
                    found.at(KINDS[key], key, name, part, value.shape, value.dtype).add(value, file)


def _states(state: Any) -> Iterator[dict[str, Any]]:
    """Of a chain, each optimizer's state dict, without its tensors."""
    for one in states_of(state):
        yield {key: value for key, value in one.items() if key != "param_state"}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
