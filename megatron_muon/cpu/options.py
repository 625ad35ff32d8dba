"""Options of Megatron-LM that only a GPU can run, and what stands in for them on a CPU.

Functions of Megatron's parsed arguments, before it checks them. They replace how
something is computed or sent; the model, the data and the schedule stay as they were
asked for.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple


class Replaced(NamedTuple):
    """An option that has a counterpart on the CPU."""

    dest: str
    gpu: tuple[Any, ...]  # its values that need a GPU; of an enumeration their names
    cpu: Any  # the value that it gets
    why: str  # the GPU is needed for it
    flag: str = ""  # how the CPU's value is written, where that is not --DEST CPU


class Refused(NamedTuple):
    """An option that has none: the argument's name, why it needs a GPU, what to write
    instead.

    ``needs_gpu`` says whether the argument's value does.
    """

    dest: str
    why: str
    instead: str = "leave it out"
    needs_gpu: Callable[[Any], bool] = bool

    @property
    def option(self) -> str:
        """The flag, as it is written."""
        return _FLAGS.get(self.dest, f"--{self.dest.replace('_', '-')}")


_FLAGS = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "fp4_param": "--fp4-param-gather",
    "nccl_ub": "--use-nccl-ub",
}
_NCCL = "NCCL connects GPUs only"
_TE = "it is Transformer Engine's, which is CUDA code"
_CAPTURES = "it captures kernels"
_BF16 = "leave it out, for --bf16"

REPLACED = (
    Replaced("distributed_backend", ("nccl",), "gloo", _NCCL),
    Replaced(
        "transformer_impl",
        ("transformer_engine",),
        "local",
        "Transformer Engine's layers are CUDA code",
    ),
    Replaced(
        "attention_backend",
        ("flash", "fused"),
        "unfused",
        "it is a kernel that Transformer Engine chooses",
    ),
    Replaced(
        "no_persist_layer_norm",
        (False,),
        True,
        "the persistent LayerNorm is Apex's",
        "--no-persist-layer-norm",
    ),
    Replaced(
        "gradient_accumulation_fusion",
        (True,),
        False,
        "it is a CUDA extension of Apex",
        "--no-gradient-accumulation-fusion",
    ),
    Replaced(
        "masked_softmax_fusion",
        (True,),
        False,
        "it is a CUDA kernel",
        "--no-masked-softmax-fusion",
    ),
    Replaced(
        "apply_rope_fusion",
        (True,),
        False,
        "it is a kernel of Transformer Engine",
        "--no-rope-fusion",
    ),
    Replaced(
        "moe_permute_fusion",
        (True,),
        False,
        "the fused permutation of tokens is Transformer Engine's",
        "no --moe-permute-fusion",
    ),
)


def _is(name: str) -> Callable[[Any], bool]:
    return lambda value: bool(_name(value) == name)


def _name(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value


REFUSED = (
    Refused(
        "transformer_impl", _TE, "--transformer-impl local", _is("inference_optimized")
    ),
    Refused("fp8", "a CPU has no fp8 products", _BF16),
    Refused("fp4", "a CPU has no fp4 products", _BF16),
    Refused("enable_cuda_graph", _CAPTURES),
    Refused("external_cuda_graph", _CAPTURES),
    Refused("optimizer_cuda_graph", _CAPTURES),
    Refused(
        "cuda_graph_impl",
        _CAPTURES,
        "--cuda-graph-impl none",
        lambda value: value not in (None, "none"),
    ),
    Refused("fp8_param_gather", _TE),
    Refused("fp4_param", _TE),
    Refused("tp_comm_overlap", _TE),
    Refused("te_rng_tracker", _TE),
    Refused("delay_wgrad_compute", _TE),
    Refused("cpu_offloading", _TE),
    Refused("use_precision_aware_optimizer", _TE),
    Refused("moe_router_fusion", _TE),
    Refused(
        "defer_embedding_wgrad_compute",
        "it needs the fused gradient accumulation of Apex",
    ),
    Refused(
        "cross_entropy_fusion_impl",
        _TE,
        "--cross-entropy-fusion-impl native",
        _is("te"),
    ),
    Refused(
        "moe_token_dispatcher_type",
        "its kernels are DeepEP's or HybridEP's",
        "--moe-token-dispatcher-type alltoall",
        _is("flex"),
    ),
    Refused("moe_enable_deepep", "DeepEP is CUDA code"),
    Refused("nccl_ub", _NCCL),
    Refused("use_sharp", _NCCL),
    Refused("nccl_communicator_config_path", _NCCL),
    Refused("high_priority_stream_groups", _NCCL),
    Refused("record_memory_history", "it records the GPU's allocator"),
)

# Options that the plugin does on a CPU, over the distributed optimizer alone.
_WITHOUT_SHARDS = tuple(
    Refused(
        dest,
        "Megatron's own way has the logits from Transformer Engine; the plugin has its "
        "own for the distributed optimizer",
        "--use-distributed-optimizer, or leave it out",
    )
    for dest in ("qk_clip", "log_max_attention_logit")
)


def refuse(args: Namespace) -> None:
    """Refuse what a CPU cannot run and nothing stands in for; one ValueError names them
    all.
    """
    sharded = getattr(args, "use_distributed_optimizer", False)
    refused = REFUSED if sharded else (*REFUSED, *_WITHOUT_SHARDS)
    bad = []
    for row in refused:
        value = getattr(args, row.dest, None)
        if row.needs_gpu(value):
            is_one_word = not isinstance(value, (bool, list, tuple))
            shown = f" {_name(value)}" if is_one_word else ""
            bad.append(f"{row.option}{shown} ({row.why}): {row.instead}")
    if bad:
        raise ValueError(
            "Megatron runs on the CPU here, since there is no GPU or --muon-cpu asks "
            "for it, and "
            f"{len(bad)} of the given options cannot:\n  " + "\n  ".join(bad)
        )


def replace(args: Namespace) -> list[str]:
    """Put what a CPU can run in the place of what it cannot; returns a line for
    each.
    """
    lines = []
    for row in REPLACED:
        value = getattr(args, row.dest, None)
        if _name(value) in row.gpu:
            new = type(value)[row.cpu] if isinstance(value, Enum) else row.cpu
            setattr(args, row.dest, new)
            old = "" if isinstance(value, bool) else f" in place of {_name(value)}"
            flag = row.flag or f"--{row.dest.replace('_', '-')} {row.cpu}"
            lines.append(f"on the CPU: {flag}{old}: {row.why}")
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        lines.append(
            "on the CPU: CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment: Megatron "
            "asks for it with TP and CP, and no GPU reads it here"
        )
    return lines
