"""Hardware by name. The source of a value that no document gives says that it is an assumption."""

from __future__ import annotations

from megatron_muon.pricing.hardware import Hardware

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
    ),
)

PRESETS = {"h100": H100}
