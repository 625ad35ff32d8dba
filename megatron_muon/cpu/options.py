"""Options of Megatron-LM that only a GPU can run, and what stands in for them on a CPU.

Functions of Megatron's parsed arguments, before it checks them. They replace how something is
computed or sent; the model, the data and the schedule stay as they were asked for.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple


class Replaced(NamedTuple):
    """An option that has a counterpart on the CPU.

    Attributes:
        dest: the argument's name.
        gpu: its values that need a GPU, Megatron's default or given; of an enumeration their names.
        cpu: the value that it gets.
        said: the option as it would be written.
        why: the GPU is needed for it.
    """

    dest: str
    gpu: tuple[Any, ...]
    cpu: Any
    said: str
    why: str


class Refused(NamedTuple):
    """An option that has none.

    Attributes:
        dest: the argument's name.
        option: the flag, as it is written.
        needs_gpu: whether the argument's value needs a GPU.
        why: it needs a GPU.
        instead: the words for what takes its place.
    """

    dest: str
    option: str
    needs_gpu: Callable[[Any], bool]
    why: str
    instead: str


_NCCL = "NCCL connects GPUs only"
_TE = "it is Transformer Engine's, which is CUDA code"
_OUT = "leave it out"

REPLACED = (
    Replaced("distributed_backend", ("nccl",), "gloo", "--distributed-backend gloo", _NCCL),
    Replaced(
        "transformer_impl",
        ("transformer_engine",),
        "local",
        "--transformer-impl local",
        "Transformer Engine's layers are CUDA code",
    ),
    Replaced(
        "attention_backend",
        ("flash", "fused"),
        "unfused",
        "--attention-backend unfused",
        "it is a kernel that Transformer Engine chooses",
    ),
    Replaced(
        "no_persist_layer_norm",
        (False,),
        True,
        "--no-persist-layer-norm",
        "the persistent LayerNorm is Apex's",
    ),
    Replaced(
        "gradient_accumulation_fusion",
        (True,),
        False,
        "--no-gradient-accumulation-fusion",
        "it is a CUDA extension of Apex",
    ),
    Replaced(
        "masked_softmax_fusion", (True,), False, "--no-masked-softmax-fusion", "it is a CUDA kernel"
    ),
    Replaced(
        "apply_rope_fusion",
        (True,),
        False,
        "--no-rope-fusion",
        "it is a kernel of Transformer Engine",
    ),
    Replaced(
        "moe_permute_fusion",
        (True,),
        False,
        "no --moe-permute-fusion",
        "the fused permutation of tokens is Transformer Engine's",
    ),
)


def _is_on(value: Any) -> bool:
    return bool(value)


def _is(*names: str) -> Callable[[Any], bool]:
    return lambda value: _name(value) in names


def _name(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value


REFUSED = (
    Refused(
        "transformer_impl",
        "--transformer-impl",
        _is("inference_optimized"),
        _TE,
        "--transformer-impl local",
    ),
    Refused("fp8", "--fp8-format", _is_on, "a CPU has no fp8 products", f"{_OUT}, for --bf16"),
    Refused("fp4", "--fp4-format", _is_on, "a CPU has no fp4 products", f"{_OUT}, for --bf16"),
    Refused("fp8_param_gather", "--fp8-param-gather", _is_on, _TE, _OUT),
    Refused("fp4_param", "--fp4-param-gather", _is_on, _TE, _OUT),
    Refused("enable_cuda_graph", "--enable-cuda-graph", _is_on, "it captures kernels", _OUT),
    Refused("external_cuda_graph", "--external-cuda-graph", _is_on, "it captures kernels", _OUT),
    Refused(
        "cuda_graph_impl",
        "--cuda-graph-impl",
        lambda value: value not in (None, "none"),
        "it captures kernels",
        "--cuda-graph-impl none",
    ),
    Refused("optimizer_cuda_graph", "--optimizer-cuda-graph", _is_on, "it captures kernels", _OUT),
    Refused("tp_comm_overlap", "--tp-comm-overlap", _is_on, _TE, _OUT),
    Refused("te_rng_tracker", "--te-rng-tracker", _is_on, _TE, _OUT),
    Refused("delay_wgrad_compute", "--delay-wgrad-compute", _is_on, _TE, _OUT),
    Refused("cpu_offloading", "--cpu-offloading", _is_on, _TE, _OUT),
    Refused("use_precision_aware_optimizer", "--use-precision-aware-optimizer", _is_on, _TE, _OUT),
    Refused(
        "defer_embedding_wgrad_compute",
        "--defer-embedding-wgrad-compute",
        _is_on,
        "it needs the fused gradient accumulation of Apex",
        _OUT,
    ),
    Refused(
        "cross_entropy_fusion_impl",
        "--cross-entropy-fusion-impl",
        _is("te"),
        _TE,
        "--cross-entropy-fusion-impl native",
    ),
    Refused("moe_router_fusion", "--moe-router-fusion", _is_on, _TE, _OUT),
    Refused(
        "moe_token_dispatcher_type",
        "--moe-token-dispatcher-type",
        _is("flex"),
        "its kernels are DeepEP's or HybridEP's",
        "--moe-token-dispatcher-type alltoall",
    ),
    Refused("moe_enable_deepep", "--moe-enable-deepep", _is_on, "DeepEP is CUDA code", _OUT),
    Refused("nccl_ub", "--use-nccl-ub", _is_on, _NCCL, _OUT),
    Refused("use_sharp", "--use-sharp", _is_on, _NCCL, _OUT),
    Refused(
        "nccl_communicator_config_path", "--nccl-communicator-config-path", _is_on, _NCCL, _OUT
    ),
    Refused("high_priority_stream_groups", "--high-priority-stream-groups", _is_on, _NCCL, _OUT),
    Refused(
        "record_memory_history",
        "--record-memory-history",
        _is_on,
        "it records the GPU's allocator",
        _OUT,
    ),
)

_LOGITS = "Megatron's own way has the logits from Transformer Engine; the plugin has its own for "
_LOGITS += "the distributed optimizer"
_SHARDS = "--use-distributed-optimizer, or leave it out"
# Options that the plugin does on a CPU, over the distributed optimizer alone.
_WITHOUT_SHARDS = (
    Refused("qk_clip", "--qk-clip", _is_on, _LOGITS, _SHARDS),
    Refused("log_max_attention_logit", "--log-max-attention-logit", _is_on, _LOGITS, _SHARDS),
)


def refuse(args: Namespace) -> None:
    """Refuse what a CPU cannot run and nothing stands in for.

    Args:
        args: Megatron's, parsed; options that its version lacks are passed over.

    Raises:
        ValueError: names every one of them, with what to write.
    """
    sharded = getattr(args, "use_distributed_optimizer", False)
    refused = REFUSED if sharded else (*REFUSED, *_WITHOUT_SHARDS)
    bad = [
        f"{row.option}{_shown(value)} ({row.why}): {row.instead}"
        for row in refused
        if row.needs_gpu(value := getattr(args, row.dest, None))
    ]
    if bad:
        raise ValueError(
            "Megatron runs on the CPU here, since there is no GPU or --muon-cpu asks for it, and "
            f"{len(bad)} of the given options cannot:\n  " + "\n  ".join(bad)
        )


def _shown(value: Any) -> str:
    if isinstance(value, (bool, list, tuple)):
        return ""
    return f" {_name(value)}"


def replace(args: Namespace) -> list[str]:
    """Put what a CPU can run in the place of what it cannot; twice is once.

    Args:
        args: Megatron's, parsed, not yet checked.

    Returns:
        A line to print for each that was replaced.
    """
    lines = []
    for row in REPLACED:
        value = getattr(args, row.dest, None)
        if _name(value) in row.gpu:
            setattr(args, row.dest, type(value)[row.cpu] if isinstance(value, Enum) else row.cpu)
            old = "" if isinstance(value, bool) else f" in place of {_name(value)}"
            lines.append(f"on the CPU: {row.said}{old}: {row.why}")
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        why = "Megatron asks for it with TP and CP, and no GPU reads it here"
        lines.append(f"on the CPU: CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment: {why}")
    return lines
