"""Hardware by name. The source of a value that no document gives says that it is an assumption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_muon.lab.pricing.hardware import CONSTANTS, Hardware, finite, from_json

_SHEET = "NVIDIA's H100 data sheet, SXM"
_FOREACH = "torch's MultiTensorApply.cuh: 320 blocks of 65,536 elements a kernel"
_KERNELS = (
    "assumption; https://dao-lab.ai/blog/2026/gram-newton-schulz reports about twice the speed"
)

H100 = Hardware(
    name="H100 SXM",
    dense_tflops=989.4,
    fp32_tflops=66.9,
    gemm_efficiency=0.72,
    processors=132,
    tiles=((128, 256, 1.0), (128, 128, 0.88), (64, 128, 0.70), (64, 64, 0.5)),
    split_efficiency=0.7,
    split_us=3.0,
    symmetric_ratio=0.55,
    symmetric_rows=257,
    memory_gbytes=3350.0,
    memory_efficiency=0.80,
    kernel_us=2.5,
    launch_us=4.5,
    phase_us=30.0,
    node_gbytes=450.0,
    node_efficiency=0.70,
    pair_gbytes=180.0,
    network_gbytes=50.0,
    network_efficiency=0.85,
    message_us=25.0,
    peer_us=1.2,
    peer_host_us=0.35,
    gpus_per_node=8,
    foreach_elements=320 * 65536,
    foreach_tensors=48,
    host_waits=0,
    sources=(
        ("dense_tflops", f"{_SHEET}: 1,979 with sparsity, half of it dense"),
        ("fp32_tflops", f"{_SHEET}: 67"),
        ("gemm_efficiency", "assumption: 712 TFLOP/s, cuBLAS at the power limit of 700 W"),
        ("processors", "NVIDIA H100 white paper: 132 SMs"),
        ("tiles", "assumption: tiles of cuBLAS on Hopper, smaller ones slower"),
        ("split_efficiency", "assumption"),
        ("split_us", "assumption: the pass that adds the parts"),
        ("symmetric_ratio", _KERNELS),
        ("symmetric_rows", "iteration.py: quack's kernel takes more than one tile of 256 rows"),
        ("memory_gbytes", f"{_SHEET}: 3.35 TB/s"),
        ("memory_efficiency", "https://mikamirai.com/blog/gpu-memory-bandwidth: 84 % of coalesced"),
        ("kernel_us", "assumption"),
        ("launch_us", "assumption: the low end of the 5 to 25 us reported for an eager operation"),
        ("phase_us", "assumption: Python of a phase, its tables made before"),
        ("node_gbytes", f"{_SHEET}: NVLink 900 GB/s, half of it each way"),
        ("node_efficiency", "assumption; 0.82 for rings: github.com/NVIDIA/nccl-tests/issues/212"),
        ("pair_gbytes", "sendrecv_perf's plateau: github.com/NVIDIA/nccl-tests/issues/268"),
        ("network_gbytes", "a port of 400 Gbit/s for each GPU"),
        ("network_efficiency", "assumption"),
        ("message_us", "assumption; 31 to 34 us on A40: github.com/NVIDIA/nccl-tests/issues/214"),
        ("peer_us", "assumption"),
        ("peer_host_us", "assumption: ncclSend or ncclRecv inside a group"),
        ("gpus_per_node", "HGX H100"),
        ("foreach_elements", _FOREACH),
        ("foreach_tensors", "the same file: 48 tensors for an operation of three lists"),
        ("host_waits", "CUDA streams"),
        ("momentum_bytes", "fp32, as Muon keeps it; 2 is for a momentum that it does not have"),
    ),
)


def _like(base: Hardware, name: str, values: dict[str, tuple[Any, str]]) -> Hardware:
    """Another GPU: constants with the source of each; all others are those of ``base``."""
    made = base.with_values({key: value for key, (value, _) in values.items()}, name)
    assumed = {
        key: source if source.startswith("assumption") else f"as for {base.name}: {source}"
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
    },
)
B200 = _like(
    H100,
    "B200 (HGX)",
    {
        "dense_tflops": (2250.0, "NVIDIA's HGX B200 data sheet: 36 PFLOPS with sparsity, 8 GPUs"),
        "fp32_tflops": (75.0, "NVIDIA's HGX B200 data sheet: 600 TFLOPS of 8 GPUs"),
        "processors": (148, "148 SMs"),
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
        "dense_tflops": (2500.0, "NVIDIA's GB300 NVL72 data sheet: 360 PFLOPS with sparsity, 72"),
        "fp32_tflops": (80.0, "https://verda.com/blog/gb300-nvl72-architecture"),
        "processors": (160, "Blackwell Ultra: 160 SMs"),
        "memory_gbytes": (8000.0, "NVIDIA's GB300 NVL72 data sheet: 576 TB/s of 72 GPUs"),
        "network_gbytes": (100.0, "a ConnectX-8 of 800 Gbit/s for each GPU"),
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
        hardware = from_json(Path(name).read_text(), name, H100)
    else:
        raise ValueError(
            f"--hardware {name}: neither a file nor one of {', '.join(PRESETS)}; a file is JSON, "
            '{"name": ..., "values": {constant: number}, "sources": {constant: text}}'
        )
    values: dict[str, Any] = {}
    for setting in settings:
        constant, equals, text = setting.partition("=")
        if not equals or constant not in CONSTANTS or constant == "tiles":
            names = ", ".join(known for known in CONSTANTS if known != "tiles")
            raise ValueError(f"--set {setting}: give NAME=VALUE, where NAME is one of {names}")
        values[constant] = _number(setting, text)
    return hardware.with_values(values, "--set")


def _number(setting: str, text: str) -> float:
    try:
        return finite(text)
    except ValueError:
        raise ValueError(f"--set {setting}: {text!r} is not a finite number") from None
