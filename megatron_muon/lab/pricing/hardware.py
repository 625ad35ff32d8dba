"""A machine as the time model sees it: named constants, each with its unit and its source."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_muon.console import printable

GIGA, TERA, MICRO = 1e9, 1e12, 1e-6
Tiles = tuple[tuple[int, int, float], ...]


def _constant(unit: str, *, zero: bool = False, whole: bool = False) -> Any:
    """A field for a number above 0; with ``zero`` also 0, with ``whole`` an integer."""
    return field(metadata={"unit": unit, "zero": zero, "whole": whole})


def _share() -> Any:
    """A field for a fraction above 0 and at most 1."""
    return field(metadata={"unit": "share", "zero": False, "whole": False, "most": 1.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Constants of a GPU, its host and its links; rates per GPU and direction.

    Attributes:
        name: its name in tables.
        dense_tflops: peak of dense products in 16 bits.
        fp32_tflops: peak of products in fp32 without TF32.
        gemm_efficiency: share of the peak that a large product reaches.
        processors: number of tiles that are worked on at once; a product takes whole waves of them.
        tiles: (rows, cols, share of ``gemm_efficiency``) of the tiles that a product may take.
        split_efficiency: further share for a product that has fewer tiles than processors and is
            cut along its inner dim.
        split_us: time that such a cut adds.
        symmetric_ratio: time of a symmetric product with a library's kernel over a plain one's, on
            the kind of device that has one (``iteration.Device``); 1 where none is priced.
        symmetric_rows: least rows of a matrix that such a kernel takes.
        memory_gbytes: peak bandwidth of the memory, reads and writes together.
        memory_efficiency: share of ``memory_gbytes`` that elementwise kernels reach.
        kernel_us: time of the shortest kernel, with the gap before the next.
        launch_us: host time from one operation's launch to the next one's.
        phase_us: host time of the Python of each phase of a round.
        node_gbytes: a GPU's link to the GPUs of its node.
        node_efficiency: share of ``node_gbytes`` that grouped sends and receives reach.
        pair_gbytes: limit between two GPUs of a node.
        network_gbytes: a GPU's link to other nodes.
        network_efficiency: share of ``network_gbytes`` that grouped sends and receives reach.
        message_us: latency of a grouped send and receive, whatever its bytes.
        peer_us: latency that each peer in it adds.
        peer_host_us: host time to enqueue a send or a receive.
        gpus_per_node: n, where ranks k·n to k·n + n - 1 of a stage share a node.
        foreach_elements: most elements that one kernel of a ``torch._foreach`` operation takes.
        foreach_tensors: most tensors that it takes.
        host_waits: 1 where the host makes every operation itself, as on a CPU; 0 where it only
            launches them.
        momentum_bytes: of an element of momentum. Muon keeps fp32; 2 says what 16 bits would save.
        sources: (constant, source of its value).

    Raises:
        ValueError, TypeError: a constant is not a number of its kind; names it.
    """

    name: str
    dense_tflops: float = _constant("10^12 flop/s")
    fp32_tflops: float = _constant("10^12 flop/s")
    gemm_efficiency: float = _share()
    processors: int = _constant("processors", whole=True)
    tiles: Tiles = field(metadata={"unit": "rows x cols: share"})
    split_efficiency: float = _share()
    split_us: float = _constant("us", zero=True)
    symmetric_ratio: float = _share()
    symmetric_rows: int = _constant("rows", whole=True)
    memory_gbytes: float = _constant("10^9 bytes/s")
    memory_efficiency: float = _share()
    kernel_us: float = _constant("us", zero=True)
    launch_us: float = _constant("us", zero=True)
    phase_us: float = _constant("us", zero=True)
    node_gbytes: float = _constant("10^9 bytes/s")
    node_efficiency: float = _share()
    pair_gbytes: float = _constant("10^9 bytes/s")
    network_gbytes: float = _constant("10^9 bytes/s")
    network_efficiency: float = _share()
    message_us: float = _constant("us", zero=True)
    peer_us: float = _constant("us", zero=True)
    peer_host_us: float = _constant("us", zero=True)
    gpus_per_node: int = _constant("GPUs", whole=True)
    foreach_elements: int = _constant("elements", whole=True)
    foreach_tensors: int = _constant("tensors", whole=True)
    host_waits: int = field(metadata={"unit": "0 or 1", "zero": True, "whole": True, "most": 1})
    momentum_bytes: int = field(
        default=4, metadata={"unit": "bytes", "zero": False, "whole": True, "most": 4}
    )
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in CONSTANTS:
            _check(name, getattr(self, name))
        unknown = sorted({name for name, _ in self.sources} - set(CONSTANTS))
        if unknown:
            raise ValueError(f"sources name {unknown[0]!r}, which is no constant")

    def with_values(self, values: Mapping[str, Any], source: str) -> Hardware:
        """This hardware with other values of some constants.

        Args:
            values: the new values by name.
            source: the source of all of them.

        Raises:
            ValueError, TypeError: a name is not known or a value is not of its kind.
        """
        for name in values:
            if name not in CONSTANTS:
                raise ValueError(
                    f"{name!r} is no constant of the hardware; they are {', '.join(CONSTANTS)}"
                )
        known = dict(self.sources) | dict.fromkeys(values, source)
        changed = {name: _typed(name, value) for name, value in values.items()}
        return replace(self, **changed, sources=tuple(known.items()))

    def lines(self) -> list[str]:
        """Every constant with its unit and source, one per line."""
        sources = dict(self.sources)
        return [
            f"{name} {_spelled(getattr(self, name))} {constant.metadata['unit']}"
            f" ({sources.get(name, 'no source')})"
            for name, constant in CONSTANTS.items()
        ]

    @property
    def memory(self) -> float:
        """Bytes/s of an elementwise kernel."""
        return self.memory_gbytes * GIGA * self.memory_efficiency

    @property
    def node_link(self) -> float:
        """Bytes/s that a GPU sends, and as many that it receives, inside its node."""
        return self.node_gbytes * GIGA * self.node_efficiency

    @property
    def network_link(self) -> float:
        """Bytes/s that a GPU sends, and as many that it receives, from node to node."""
        return self.network_gbytes * GIGA * self.network_efficiency


CONSTANTS = {f.name: f for f in fields(Hardware) if f.name not in ("name", "sources")}


def from_json(text: str, source: str, base: Hardware) -> Hardware:
    """Hardware from ``{"name": …, "values": {constant: value}, "sources": {constant: text}}``.

    Args:
        text: JSON; all three keys may be missing.
        source: the file's name, and the source of values for which the file has none.
        base: the constants that are not in ``values``.

    Raises:
        ValueError, TypeError: it is not such JSON; names what is wrong.
    """
    try:
        given = json.loads(text, parse_constant=_refused, parse_int=_whole, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{source}: hardware is a JSON object, got {type(given).__name__}")
    kinds = {"name": str, "values": dict, "sources": dict}
    for key, value in given.items():
        if key not in kinds:
            raise ValueError(f"{source}: {key!r} is not one of {', '.join(kinds)}")
        if not isinstance(value, kinds[key]):
            raise TypeError(f"{source}: {key!r} must be a JSON {kinds[key].__name__}")
    made = base.with_values(given.get("values", {}), source)
    sources = given.get("sources", {})
    for name, one in sources.items():
        if not isinstance(one, str):
            raise TypeError(f"{source}: the source of {name!r} must be a text, got {one!r}")
    known = dict(made.sources) | {name: printable(one) for name, one in sources.items()}
    name = printable(given.get("name", source))
    return replace(made, name=name, sources=tuple(known.items()))


def finite(text: str) -> float:
    """A number from a file or a command line.

    Raises:
        ValueError: it is none, or not finite.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not finite")
    return value


def _whole(text: str) -> int:
    finite(text)  # and so of at most 309 digits
    return int(text)


def _refused(text: str) -> Any:
    raise ValueError(f"{text} is not finite")


def _typed(name: str, value: Any) -> Any:
    """A value from JSON or a command line, in the form of its field."""
    if name == "tiles":
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"tiles must be a list of [rows, cols, share], got {value!r}")
        return tuple(tuple(tile) if isinstance(tile, list) else tile for tile in value)
    if CONSTANTS[name].metadata["whole"] and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _check(name: str, value: Any) -> None:
    if name == "tiles":
        _check_tiles(value)
        return
    marks = CONSTANTS[name].metadata
    kinds = (int,) if marks["whole"] else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        wanted = "a whole number" if marks["whole"] else "a number"
        raise TypeError(f"{name} must be {wanted} ({marks['unit']}), got {value!r}")
    least = value >= 0 if marks["zero"] else value > 0
    if math.isnan(value) or not least or value > marks.get("most", math.inf):
        most = f", at most {marks['most']:g}" if "most" in marks else ""
        wanted = "at least 0" if marks["zero"] else "above 0"
        raise ValueError(f"{name} must be {wanted}{most}, got {value!r}")


def _check_tiles(tiles: Any) -> None:
    fits = isinstance(tiles, tuple) and all(
        isinstance(tile, tuple)
        and len(tile) == 3
        and all(isinstance(part, (int, float)) and not isinstance(part, bool) for part in tile)
        and min(tile[:2]) >= 1
        and 0 < tile[2] <= 1
        for tile in tiles
    )
    if not fits or not tiles:
        raise ValueError(f"tiles must be rows, cols and a share of at most 1 each, got {tiles!r}")


def _spelled(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{rows}x{cols}: {share:g}" for rows, cols, share in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
