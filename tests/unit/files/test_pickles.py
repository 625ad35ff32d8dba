"""Files read as data: the same values as torch.load, and nothing that a file chooses."""

from __future__ import annotations

import argparse
import collections
import enum
import io
import os
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_muon.lab.inspect.limited import LimitError, limited
from megatron_muon.mcore.checkpoint import read
from megatron_muon.mcore.checkpoint.read import ReadError, Unknown
from support.checkpoints.attacks import STRANGE, tensor_pickle, zipped


class _Color(enum.Enum):
    RED = 1


def _values() -> dict[str, Any]:
    shared = torch.arange(12.0)
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.partition_dim = 0
    return {
        "numbers": [0, 1, -1, 255, 256, 65535, 65536, -(2**31), 2**31, 2**63, -(2**100), 1.5, -0.0],
        "texts": ["", "é", "𝄞", "x" * 300, "\ud800"],
        "bytes": [b"", b"a\0b", b"x" * 300, bytearray(b"abc")],
        "others": (None, True, False, 1 + 2j, {1, "a"}, frozenset([2]), (), (1,), (1, (2, (3,)))),
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, {1: [2]}),
        "keys": {1: 2, (torch.bfloat16, torch.float32): 3, None: 4, "x": 5},
        "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16, sizes=[1, 2]),
        "size": torch.Size([2, 3]),
        "views": [shared, shared[3:5], shared.view(3, 4).t(), shared[7]],
        "empty": [torch.empty(0), torch.empty(3, 0)],
        "dtypes": [torch.ones(3, dtype=dtype) for dtype in _DTYPES],
        "parameter": parameter,
        "module": torch.nn.Linear(2, 3).state_dict(),
        "twice": [shared] * 2,
    }


_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def _same(one: Any, two: Any) -> bool:
    """Equal; a dict of any class is a dict, a parameter a tensor."""
    if isinstance(one, torch.Tensor):
        if one.numel() == 0:
            return one.dtype == two.dtype and one.numel() == two.numel()
        raw = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, two)]
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(*raw)
    if isinstance(one, dict):
        return list(one) == list(two) and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, argparse.Namespace):
        return _same(vars(one), vars(two))
    if isinstance(one, (list, tuple)) and not isinstance(one, torch.Size):
        return type(one) is type(two) and all(map(_same, one, two)) and len(one) == len(two)
    return bool(one == two)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_an_archive_holds_what_torch_load_reads(protocol: int, tmp_path: Path) -> None:
    file = tmp_path / "saved.pt"
    torch.save(_values(), file, pickle_protocol=protocol)
    expected, actual = torch.load(file, weights_only=False), read.load(file)
    assert expected.keys() == actual.keys()
    for name in expected:
        assert _same(expected[name], actual[name]), (name, expected[name], actual[name])
    assert _same(expected, read.load(file.read_bytes()))


def test_objects_of_other_classes_are_not_made(tmp_path: Path) -> None:
    saved = {"color": _Color.RED, "random": numpy.random.get_state(), "io": io.BytesIO(b"abc")}
    torch.save(saved, tmp_path / "saved.pt")
    loaded = read.load(tmp_path / "saved.pt")
    assert isinstance(loaded["color"], Unknown)
    assert loaded["color"].named == (__name__, "_Color")
    assert isinstance(loaded["random"][1], Unknown)
    assert loaded["io"].state[0] == b"abc"


def _read_each(data: bytes, file: Path) -> str:
    """What reading it as a pickle and in an archive makes, on a line each."""
    lines = []
    file.write_bytes(data)
    for load in (lambda: read.load_pickle(file), lambda: read.load(zipped(data))):
        try:
            value = load()
            assert value is None or isinstance(value, (Unknown, type, list, str))
            lines.append("an object that does nothing")
        except ReadError:
            lines.append("refused")
        assert vars(argparse.Namespace).keys() == _NAMESPACE
        assert torch._utils._rebuild_tensor_v2.__defaults__ == (None,)
    return "\n".join(lines)


_NAMESPACE = vars(argparse.Namespace).keys() | set()


@pytest.mark.parametrize("strange", STRANGE)
def test_a_pickle_that_no_pickler_writes(strange: str, tmp_path: Path) -> None:
    """Each is refused, is an object that does nothing, or ends a process with limits."""
    try:
        file = tmp_path / "file"
        lines = limited(lambda: _read_each(STRANGE[strange], file), tmp_path).splitlines()
    except LimitError:
        assert strange == "a key of many tuples"
        return
    if lines != ["refused"] * 2:
        assert lines == ["an object that does nothing"] * 2
        assert strange in (
            *("an attribute of a class", "defaults of a function", "an attribute of a module"),
            *("a name with dots", "getattr", "eval", "many lists", "INST", "OBJ"),
            *("text of protocol 0", "a known class with keywords"),
        )


@pytest.mark.parametrize(
    ("numel", "offset", "size", "stride"),
    [
        (10, 8, (3,), (1,)),
        (10, 0, (11,), (1,)),
        (10, -1, (2,), (1,)),
        (10, 0, (2,), (-1,)),
        (10, 0, (-2,), (1,)),
        (10, 0, (2, 2), (9, 1)),
        (10, 0, (1 << 40,), (0,)),  # inside, but a sum over it would never end
        (10, 0, (1 << 61, 1 << 61), (1, 1)),
        (10, 1 << 61, (1,), (1,)),
        (10, 0, (2,), (1, 1)),
        (1000, 0, (2,), (1,)),  # behind the file's end
        (-1, 0, (2,), (1,)),
        (1 << 61, 0, (2,), (1,)),
    ],
)
def test_a_tensor_stays_inside_of_its_record(
    numel: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    record = {"data/0": bytes(40)}
    good = read.load(zipped(tensor_pickle(10, 8, (2,), (1,)), record))
    assert torch.equal(good, torch.zeros(2))
    with pytest.raises(ReadError):
        read.load(zipped(tensor_pickle(numel, offset, size, stride), record))


def test_no_other_storage(tmp_path: Path) -> None:
    record = {"data/0": bytes(40)}
    for kind in ("QInt8", "Typed", "_Legacy"):
        with pytest.raises(ReadError, match="damaged"):
            read.load(zipped(tensor_pickle(10, 0, (2,), (1,), kind), record))
    with pytest.raises(ReadError, match="damaged"):
        read.load(zipped(tensor_pickle(10, 0, (2,), (1,))))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("empty", "no archive"), ("pipe", "no regular"), ("", "no regular")):
        with pytest.raises(ReadError, match=why):
            read.load(tmp_path / name)


def test_a_damaged_archive_is_an_error_of_its_own(tmp_path: Path) -> None:
    """Every byte that is changed leads to a value or to ReadError."""
    file = io.BytesIO()
    saved = {"a": torch.ones(3), "args": argparse.Namespace(x=[1, {"y": (2, "z")}]), "b": {1, 2}}
    torch.save(saved, file)
    data, rng = file.getvalue(), random.Random(0)

    def errors() -> str:
        count = 0
        for at in range(len(data)):
            changed = bytearray(data)
            changed[at] ^= 1 << rng.randrange(8)
            for each in (changed, data[:at]):
                try:
                    read.load(bytes(each))
                except ReadError:
                    count += 1
        return str(count)

    assert int(limited(errors, tmp_path)) > len(data)  # all that are cut off, and some others
