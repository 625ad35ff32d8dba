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
    said: str = ""  # the option as it would be written, where that is not --DEST CPU


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
}
_FLAGS |= {"nccl_ub": "--use-nccl-ub"}
_NCCL = "NCCL connects GPUs only"
_TE = "it is Transformer Engine's, which is CUDA code"
_CAPTURES = "it captures kernels"
_TE_LAYERS = "Transformer Engine's layers are CUDA code"
_PERMUTATION = "the fused permutation of tokens is Transformer Engine's"
_ROPE = "it is a kernel of Transformer Engine"
_CHOSEN = "it is a kernel that Transformer Engine chooses"
_APEX = "it is a CUDA extension of Apex"
_KERNEL, _NO_FUSED_ACCUMULATION = (
    "it is a CUDA kernel",
    "--no-gradient-accumulation-fusion",
)
_PERSISTENT = "the persistent LayerNorm is Apex's"

REPLACED = (
    Replaced("distributed_backend", ("nccl",), "gloo", _NCCL),
    Replaced("transformer_impl", ("transformer_engine",), "local", _TE_LAYERS),
    Replaced("attention_backend", ("flash", "fused"), "unfused", _CHOSEN),
    Replaced(
        "no_persist_layer_norm", (False,), True, _PERSISTENT, "--no-persist-layer-norm"
    ),
    Replaced(
        "gradient_accumulation_fusion", (True,), False, _APEX, _NO_FUSED_ACCUMULATION
    ),
    Replaced(
        "masked_softmax_fusion", (True,), False, _KERNEL, "--no-masked-softmax-fusion"
    ),
    Replaced("apply_rope_fusion", (True,), False, _ROPE, "--no-rope-fusion"),
    Replaced(
        "moe_permute_fusion", (True,), False, _PERMUTATION, "no --moe-permute-fusion"
    ),
)


def _is(*names: str) -> Callable[[Any], bool]:
    return lambda value: _name(value) in names


def _name(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value


_BF16 = "leave it out, for --bf16"
_DEEPEP = "its kernels are DeepEP's or HybridEP's"
_ACCUMULATES = "it needs the fused gradient accumulation of Apex"

REFUSED = (
    Refused(
        "transformer_impl", _TE, "--transformer-impl local", _is("inference_optimized")
    ),
    Refused("fp8", "a CPU has no fp8 products", _BF16),
    Refused("fp4", "a CPU has no fp4 products", _BF16),
    *(
        Refused(f"{name}_cuda_graph", _CAPTURES)
        for name in ("enable", "external", "optimizer")
    ),
    Refused(
        "cuda_graph_impl",
        _CAPTURES,
        "--cuda-graph-impl none",
        lambda x: x not in (None, "none"),
    ),
    *(
        Refused(name, _TE)
        for name in ("fp8_param_gather", "fp4_param", "tp_comm_overlap")
    ),
    *(
        Refused(name, _TE)
        for name in ("te_rng_tracker", "delay_wgrad_compute", "cpu_offloading")
    ),
    *(
        Refused(name, _TE)
        for name in ("use_precision_aware_optimizer", "moe_router_fusion")
    ),
    Refused("defer_embedding_wgrad_compute", _ACCUMULATES),
    Refused(
        "cross_entropy_fusion_impl",
        _TE,
        "--cross-entropy-fusion-impl native",
        _is("te"),
    ),
    Refused(
        "moe_token_dispatcher_type",
        _DEEPEP,
        "--moe-token-dispatcher-type alltoall",
        _is("flex"),
    ),
    Refused("moe_enable_deepep", "DeepEP is CUDA code"),
    *(
        Refused(name, _NCCL)
        for name in ("nccl_ub", "use_sharp", "nccl_communicator_config_path")
    ),
    Refused("high_priority_stream_groups", _NCCL),
    Refused("record_memory_history", "it records the GPU's allocator"),
)

_LOGITS = (
    "Megatron's own way has the logits from Transformer Engine; the plugin "
    "has its own for "
)
_LOGITS += "the distributed optimizer"
# Options that the plugin does on a CPU, over the distributed optimizer alone.
_WITHOUT_SHARDS = tuple(
    Refused(name, _LOGITS, "--use-distributed-optimizer, or leave it out")
    for name in ("qk_clip", "log_max_attention_logit")
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
            setattr(
                args,
                row.dest,
                type(value)[row.cpu] if isinstance(value, Enum) else row.cpu,
            )
            old = "" if isinstance(value, bool) else f" in place of {_name(value)}"
            said = row.said or f"--{row.dest.replace('_', '-')} {row.cpu}"
            lines.append(f"on the CPU: {said}{old}: {row.why}")
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        why = "Megatron asks for it with TP and CP, and no GPU reads it here"
        lines.append(
            f"on the CPU: CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment: {why}"
        )
    return lines
