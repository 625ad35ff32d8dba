"""Hardware by name. The source of a value that no document gives says that it is an
assumption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_muon.console import printable
from megatron_muon.lab.json_text import finite, parsed
from megatron_muon.lab.pricing.hardware import CONSTANTS, Hardware

_SHEET = "NVIDIA's H100 data sheet, SXM"
_MEASURED = "measured by megatron-muon accept, see docs/validation.md"
_KERNELS = (
    "assumption; https://dao-lab.ai/blog/2026/gram-newton-schulz reports "
    "about twice the speed"
)
_H100: Mapping[str, tuple[Any, str]] = {
    "dense_tflops": (989.4, f"{_SHEET}: 1,979 with sparsity, half of it dense"),
    "fp32_tflops": (66.9, f"{_SHEET}: 67"),
    "gemm_efficiency": (
        0.76,
        f"{_MEASURED}: products of 0.1 to 4 Tflop, 690 to 810 TFLOP/s",
    ),
    "fp16_ratio": (0.95, f"{_MEASURED}: 0.92 to 1.01 at the same sizes"),
    "processors": (132, "NVIDIA H100 white paper: 132 SMs"),
    "split_efficiency": (0.7, "assumption"),
    "split_us": (3.0, "assumption: the pass that adds the parts"),
    "symmetric_ratio": (0.55, _KERNELS),
    "memory_gbytes": (3350.0, f"{_SHEET}: 3.35 TB/s"),
    "memory_efficiency": (0.88, f"{_MEASURED}: 2,959 GB/s"),
    "kernel_us": (2.0, _MEASURED),
    "launch_us": (
        6.9,
        f"{_MEASURED}; 9.4 us on another host, 5 to 25 reported elsewhere",
    ),
    "phase_us": (30.0, "assumption: Python of a phase, its tables made before"),
    "shard_us": (
        30.0,
        "assumption, from 15 to 40: 32 on a slow core, Megatron's part included, by "
        "tests/figures/host_times.py",
    ),
    "node_gbytes": (450.0, f"{_SHEET}: NVLink 900 GB/s, half of it each way"),
    "node_efficiency": (
        0.70,
        "assumption; 0.82 for rings: github.com/NVIDIA/nccl-tests/issues/212",
    ),
    "pair_gbytes": (
        180.0,
        "sendrecv_perf's plateau: github.com/NVIDIA/nccl-tests/issues/268",
    ),
    "network_gbytes": (50.0, "a port of 400 Gbit/s for each GPU"),
    "network_efficiency": (0.85, "assumption"),
    "message_us": (
        25.0,
        "assumption; 31 to 34 us on A40: github.com/NVIDIA/nccl-tests/issues/214",
    ),
    "peer_us": (1.2, "assumption"),
    "peer_host_us": (
        4.0,
        "measured in Python without NCCL: a slice, P2POp and isend, 3 to 4.5 us",
    ),
    "host_gbytes": (
        50.0,
        "measured: an H200's, both ways at once, 50.7 GB/s each; one way 55",
    ),
    "host_memory_gbytes": (
        35.0,
        "assumption, for 8 GPUs at once; torch's AdamW for one, 63",
    ),
    "gpus_per_node": (8, "HGX H100"),
}
H100 = Hardware(
    name="H100 SXM",
    **{name: value for name, (value, _) in _H100.items()},
    sources=tuple((name, source) for name, (_, source) in _H100.items()),
)


def _like(base: Hardware, name: str, values: Mapping[str, tuple[Any, str]]) -> Hardware:
    """Another GPU: constants with the source of each; all others are those of
    ``base``.
    """
    made = base.with_values({key: value for key, (value, _) in values.items()}, name)
    assumed = {
        key: source
        if source.startswith("assumption")
        else f"as for {base.name}: {source}"
        for key, source in base.sources
    }
    sources = assumed | {key: source for key, (_, source) in values.items()}
    return replace(made, name=name, sources=tuple(sources.items()))


H200 = _like(
    H100,
    "H200 SXM",
    {
        "dense_tflops": (989.4, "NVIDIA's H200 data sheet, SXM: 1,979 with sparsity"),
        "fp32_tflops": (66.9, "NVIDIA's H200 data sheet, SXM: 67"),
        "memory_gbytes": (4800.0, "NVIDIA's H200 data sheet: 4.8 TB/s"),
        "memory_efficiency": (0.86, f"{_MEASURED}: 4,119 GB/s"),
        "kernel_us": (1.8, _MEASURED),
        "launch_us": (9.4, _MEASURED),
    },
)
B200 = _like(
    H100,
    "B200 (HGX)",
    {
        "dense_tflops": (
            2250.0,
            "NVIDIA's HGX B200 data sheet: 36 PFLOPS with sparsity, 8 GPUs",
        ),
        "fp32_tflops": (75.0, "NVIDIA's HGX B200 data sheet: 600 TFLOPS of 8 GPUs"),
        "processors": (148, "148 SMs"),
        "launch_us": (
            3.5,
            "assumption, from 2 to 7: none was measured; an H100's is a virtual "
            "machine's, which a host of its own undercuts",
        ),
        "memory_gbytes": (7700.0, "NVIDIA's HGX B200 data sheet: 62 TB/s of 8 GPUs"),
        "node_gbytes": (900.0, "NVLink 5: 1.8 TB/s, half of it each way"),
        "pair_gbytes": (360.0, "assumption: twice an H100's, as the link is"),
        "network_gbytes": (50.0, "a port of 400 Gbit/s for each GPU"),
    },
)
GB300 = _like(
    B200,
    "GB300 (NVL72)",
    {
        "dense_tflops": (
            2500.0,
            "NVIDIA's GB300 NVL72 data sheet: 360 PFLOPS with sparsity, 72",
        ),
        "fp32_tflops": (80.0, "https://verda.com/blog/gb300-nvl72-architecture"),
        "processors": (160, "Blackwell Ultra: 160 SMs"),
        "memory_gbytes": (
            8000.0,
            "NVIDIA's GB300 NVL72 data sheet: 576 TB/s of 72 GPUs",
        ),
        "network_gbytes": (100.0, "a ConnectX-8 of 800 Gbit/s for each GPU"),
        "host_gbytes": (360.0, "assumption: NVLink-C2C, 450 GB/s each way"),
        "host_memory_gbytes": (200.0, "assumption: a Grace's 500 GB/s for 2 GPUs"),
        "gpus_per_node": (72, "an NVLink domain of 72 GPUs"),
    },
)
PRESETS = {"h100": H100, "h200": H200, "b200": B200, "gb300": GB300}


def hardware_of(name: str, settings: Sequence[str]) -> Hardware:
    """The hardware that a command line states.

    Args:
        name: name of a preset, or path of a JSON file.
        settings: ``name=value`` for each constant to change.

    Raises:
        ValueError, TypeError, OSError: ``name`` is neither, or a constant is wrong.
    """
    if name in PRESETS:
        hardware = PRESETS[name]
    elif Path(name).is_file():
        hardware = from_json(Path(name).read_text(), name)
    else:
        raise ValueError(
            f"--hardware {name}: neither a file nor one of {', '.join(PRESETS)}; a "
            "file is JSON, "
            '{"name": ..., "values": {constant: number}, "sources": {constant: text}}'
        )
    values: dict[str, Any] = {}
    for setting in settings:
        constant, equals, text = setting.partition("=")
        if not equals or constant not in CONSTANTS:
            names = ", ".join(CONSTANTS)
            raise ValueError(
                f"--set {setting}: give NAME=VALUE, where NAME is one of {names}"
            )
        try:
            values[constant] = finite(text)
        except ValueError:
            raise ValueError(
                f"--set {setting}: {text!r} is not a finite number"
            ) from None
    return hardware.with_values(values, "--set")


def from_json(text: str, source: str, base: Hardware = H100) -> Hardware:
    """Hardware from ``{"name": …, "values": {constant: value}, "sources": {constant:
    text}}``.

    Args:
        text: JSON; all three keys may be missing.
        source: the file's name, and the source of values for which the file has none.
        base: the constants that are not in ``values``.

    Raises:
        ValueError, TypeError: it is not such JSON; names what is wrong.
    """
    try:
        given = parsed(text)
    except ValueError as error:
        raise ValueError(f"{source} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(
            f"{source}: hardware is a JSON object, got {type(given).__name__}"
        )
    kinds = {"name": str, "values": dict, "sources": dict}
    for key, value in given.items():
        if key not in kinds:
            raise ValueError(f"{source}: {key!r} is not one of {', '.join(kinds)}")
        if not isinstance(value, kinds[key]):
            raise TypeError(f"{source}: {key!r} must be a JSON {kinds[key].__name__}")
    made = base.with_values(given.get("values", {}), source)
    sources = dict(made.sources)
    for name, one in given.get("sources", {}).items():
        if not isinstance(one, str):
            raise TypeError(
                f"{source}: the source of {name!r} must be a text, got {one!r}"
            )
        sources[name] = printable(one)
    name = printable(given.get("name", source))
    return replace(made, name=name, sources=tuple(sources.items()))
