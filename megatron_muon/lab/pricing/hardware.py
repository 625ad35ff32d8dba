"""A machine as the time model sees it: named constants, each with its unit and its
source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_muon.settings.coefficients import NsDtype
from megatron_muon.settings.kinds import LEAST, MOST

GIGA, TERA, MICRO = 1e9, 1e12, 1e-6
_WHOLE = ("processors", "GPUs")  # units that are counted


def _in(unit: str) -> Any:
    """A constant, whose bounds follow from its unit: see ``least_of`` and
    ``most_of``.
    """
    return field(metadata={"unit": unit})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Constants of a GPU, its host and its links; rates are per GPU and direction.

    Raises:
        ValueError, TypeError: a constant is not a number of its kind; names it.
    """

    name: str
    dense_tflops: float = _in("10^12 flop/s")  # peak of dense products in 16 bits
    fp32_tflops: float = _in("10^12 flop/s")  # peak in fp32 without TF32
    gemm_efficiency: float = _in("share")  # of the peak, by a large product
    fp16_ratio: float = _in("share")  # speed of a product in fp16 over one in bf16
    # tiles worked on at once; products take whole waves
    processors: int = _in("processors")
    # further one where a product is cut along its inner dim
    split_efficiency: float = _in("share")
    split_us: float = _in("us")  # that such a cut adds
    # a library's symmetric product over a plain one
    symmetric_ratio: float = _in("share")
    memory_gbytes: float = _in("10^9 bytes/s")  # peak, reads and writes together
    memory_efficiency: float = _in("share")  # that elementwise kernels reach
    kernel_us: float = _in("us")  # the shortest kernel, with the gap before the next
    # of the host, from one operation's launch to the next one's
    launch_us: float = _in("us")
    phase_us: float = _in("us")  # of the host: the Python of each phase of a round
    shard_us: float = _in("us")  # of the host: the Python of each shard in a whole step
    node_gbytes: float = _in("10^9 bytes/s")  # a GPU's link to the GPUs of its node
    node_efficiency: float = _in("share")  # that grouped sends and receives reach
    pair_gbytes: float = _in("10^9 bytes/s")  # limit between two GPUs of a node
    network_gbytes: float = _in("10^9 bytes/s")  # a GPU's link to other nodes
    network_efficiency: float = _in("share")  # that grouped sends and receives reach
    # latency of a grouped send and receive, whatever its bytes
    message_us: float = _in("us")
    peer_us: float = _in("us")  # latency that each peer in it adds
    peer_host_us: float = _in("us")  # of the host, to enqueue a send or a receive
    host_gbytes: float = _in("10^9 bytes/s")  # a GPU's link to its host
    # a GPU's share of it, reads and writes
    host_memory_gbytes: float = _in("10^9 bytes/s")
    gpus_per_node: int = _in("GPUs")  # n: ranks k·n to k·n + n - 1 share a node
    sources: tuple[tuple[str, str], ...] = ()  # (constant, source of its value)

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
                    f"{name!r} is no constant of the hardware; they are "
                    f"{', '.join(CONSTANTS)}"
                )
        known = dict(self.sources) | dict.fromkeys(values, source)
        changed: dict[str, Any] = {
            name: int(value)
            if CONSTANTS[name] in _WHOLE
            and isinstance(value, float)
            and value.is_integer()
            else value
            for name, value in values.items()
        }
        return replace(self, **changed, sources=tuple(known.items()))

    def lines(self) -> list[str]:
        """Every constant with its unit and source, one per line."""
        sources = dict(self.sources)
        return [
            f"{name} {getattr(self, name):g} {unit} ({sources.get(name, 'no source')})"
            for name, unit in CONSTANTS.items()
        ]

    def product_rate(self, dtype: NsDtype) -> float:
        """Flop/s of a large product."""
        tera = self.fp32_tflops if dtype == "fp32" else self.dense_tflops
        return (
            tera
            * TERA
            * self.gemm_efficiency
            * (self.fp16_ratio if dtype == "fp16" else 1.0)
        )

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


# The unit of each constant.
CONSTANTS: Mapping[str, str] = {
    each.name: each.metadata["unit"]
    for each in fields(Hardware)
    if "unit" in each.metadata
}


def least_of(name: str) -> float:
    """The smallest value that a constant can have: a time may be 0, and what is counted
    is 1.
    """
    if CONSTANTS[name] in _WHOLE:
        return 1
    return 0.0 if CONSTANTS[name] == "us" else LEAST


def most_of(name: str) -> float:
    """The largest value that a constant can have."""
    return 1.0 if CONSTANTS[name] == "share" else MOST


def _check(name: str, value: Any) -> None:
    unit = CONSTANTS[name]
    is_whole = unit in _WHOLE
    if isinstance(value, bool) or not isinstance(
        value, int if is_whole else (int, float)
    ):
        wanted = "a whole number" if is_whole else "a number"
        raise TypeError(f"{name} must be {wanted} ({unit}), got {value!r}")
    least = least_of(name)
    most = most_of(name)
    if not least <= value <= most:
        raise ValueError(
            f"{name} must be from {least:g} to {most:g} ({unit}), got {value:g}"
        )
