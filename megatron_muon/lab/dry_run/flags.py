"""Megatron-LM's flags, as far as they say which parameters a model has and where they lie.

A field of TransformerConfig is the flag of its name with dashes, or the one that Megatron's own
metadata on the field names. Megatron-LM's parser has it so (megatron/training/argument_utils.py).
Before 0.16 that metadata is not there, and ``_UNMARKED`` stands in for it. ``_add_others`` has the
flags that are no field or whose default is another one (megatron/training/arguments.py). Checked
with the parsers of core_v0.12.3 to core_v0.19.0 and of main; ``versions`` has what only some have.

Megatron-LM's own parser does not take its place where a checkout is at hand. It is not in
megatron-core's wheel, so this one would stay, and the two would have to agree.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from megatron_muon.lab.dry_run.not_built import REFUSED
from megatron_muon.lab.dry_run.numbers import MOST_ELEMENTS, MOST_THINGS, count, finite, up_to
from megatron_muon.lab.dry_run.versions import RANGES, has_flag, why_lacked
from megatron_muon.mcore.seams.rows import megatron_version

# Fields that change no parameter but ask for a GPU, or choose kernels, or steer a run.
_OF_A_RUN = re.compile(
    r"fp[48].*|.*_in_bf16|first_last_layers_bf16|tp_(comm|only)_.*|.*cuda_graph.*|recompute_.*"
    r"|moe_layer_recompute|distribute_saved_activations|attention_backend|.*_fusion|fused_.*"
    r"|.*_fusion_impl|overlap_.*|ep_overlap_.*|cpu_offloading.*|_cpu_offloading_context|use_te_.*"
    r"|moe_token_.*|moe_enable_deepep|moe_flex_.*|moe_deepep_.*|moe_hybridep_.*|moe_expert_capac.*"
    r"|moe_shared_expert_overlap|moe_pad_expert_.*|moe_router_(load|padding|force).*|moe_aux_.*"
    r"|inference_.*|use_inference_.*|flash_decode|symmetric_ar_type|.*_wgrad_.*|wgrad_deferral_.*"
    r"|fine_grained_.*|offload_modules|min_offloaded_.*|batch_invariant_mode|deterministic_mode"
    r"|window_.*|cp_comm_type|hierarchical_context_.*|hybrid_context_.*|max_seqlen_.*|barrier_.*"
    r"|.*layer_norm|no_rope_freq|mrope_section|softmax_scale|perform_initialization|test_mode"
    r"|use_cpu_initialization|init_model_with_meta_device|.*init_method.*|config_logger_dir|timers"
    r"|pipeline_dtype|params_dtype|.*_func|.*autocast.*|deallocate_.*|variable_seq_lengths"
    r"|batch_p2p_.*|use_ring_exchange_p2p|microbatch_.*|num_microbatches_.*|async_tensor_.*"
    r"|pipeline_model_parallel_comm_backend|qk_clip_.*|log_max_.*|mlp_chunks_.*|clone_scatter_.*"
    r"|.*_p2p_.*|mamba_.*_states_dtype|use_mamba_.*|dsa_.*|hetereogenous_.*|quant_recipe|memory_efficient_.*"
    r"|flash_attention_version|moe_paged_stash.*|moe_ncclep_.*|moe_.*_(fwd|bwd)_dtype|gdp_.*"
    r"|batch_invariant_backend|use_transformer_engine_op_fuser|high_priority_.*|mhc_recompute_.*"
    r"|activation_offload_.*|delta_offload_.*|moe_permute_fusion_.*|nccl_all_reduce_for_prefill"
    r"|gtp_remat_.*"
)
# Fields with a flag of their own below, or none.
_ELSEWHERE = frozenset(
    {
        *("num_moe_experts", "moe_layer_freq", "multi_latent_attention", "transformer_impl"),
        *("virtual_pipeline_model_parallel_size", "num_layers_in_first_pipeline_stage"),
        *("num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout"),
        *("gated_linear_unit", "activation_func", "linear_attention_freq", "layernorm_epsilon"),
        "layernorm_zero_centered_gamma",  # of kernels that are not used here
        *("heterogeneous_block_specs", "is_hybrid_model"),
        *("use_kitchen", "use_kitchen_attention", "kitchen_attention_backend"),
        *("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),  # follow from others
    }
)
_NONE_IS_0 = frozenset(
    {
        *("num_experts", "mtp_num_layers", "moe_shared_expert_intermediate_size"),
        *("moe_router_topk_limited_devices", "mhc_sinkhorn_iterations"),
    }
)
# Metadata of fields that say nothing themselves, in megatron-core 0.12 to 0.15.
_UNMARKED: dict[str, dict[str, Any]] = {
    "add_bias_linear": {"arg_names": ["--disable-bias-linear"]},
    "num_query_groups": {"default": 1},
    "normalization": {"choices": ["LayerNorm", "RMSNorm"]},
}


class _Refuse(argparse.Action):
    """A flag that would change the model in a way that is not built here."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        flag = self.option_strings[0]
        parser.error(f"{flag} is not supported: {REFUSED[flag]}")


class _Lack(argparse.Action):
    """A flag of other versions of Megatron."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        parser.error(why_lacked(self.option_strings[0]))


def add_megatron_flags(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Megatron's flags that are read, with Megatron's defaults.

    Args:
        parser: made with ``allow_abbrev=False``.
        config_class: TransformerConfig.
    """
    group = parser.add_argument_group("Megatron's, by field of TransformerConfig")
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if field.name not in _ELSEWHERE and not _OF_A_RUN.fullmatch(field.name):
            _add_field(group, field, hints[field.name])
    _add_others(parser.add_argument_group("Megatron's others"))
    known = {name for action in parser._actions for name in action.option_strings}
    lacked = [flag for flag in RANGES if flag not in known and not has_flag(flag)]
    refused = parser.add_argument_group("refused")
    for flag in (*REFUSED, *lacked):
        refused.add_argument(
            flag,
            action=_Refuse if flag in REFUSED else _Lack,
            nargs="*",
            dest=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def split_known(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Split ``argv``: what the parser knows, and unknown flags with their values."""
    names = {name for action in parser._actions for name in action.option_strings}
    known: list[str] = []
    unknown: list[str] = []
    inside_unknown = False
    for token in argv:
        if token.startswith("--") or token in names:
            inside_unknown = token.split("=", 1)[0] not in names
            (unknown if inside_unknown else known).append(token)
        elif inside_unknown:
            unknown[-1] += f" {token}"
        else:
            known.append(token)
    return known, unknown


def not_read(parser: argparse.ArgumentParser, unknown: Iterable[str], config_class: type) -> str:
    """A line about flags that are not read, with a question where one is nearly a known flag."""
    names = [name for action in parser._actions for name in action.option_strings]
    fields = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(config_class)}
    parts = []
    for text in unknown:
        name = re.split("[ =]", text, maxsplit=1)[0]
        near = [] if name in fields else difflib.get_close_matches(name, names, 1, 0.85)
        parts.append(text + (f" (did you mean {near[0]}?)" if near else ""))
    return "not read: " + ", ".join(parts)


def _add_field(group: argparse._ArgumentGroup, field: Any, hint: Any) -> None:
    meta = dict(field.metadata.get("argparse_meta") or _UNMARKED.get(field.name, {}))
    default = field.default
    names = meta.pop("arg_names", None)
    flag = "--" + field.name.replace("_", "-")
    kind = _kind(hint)
    if kind is None or flag in REFUSED:
        return
    options: dict[str, Any] = {
        "dest": field.name,
        "default": default,
        "help": "default %(default)s",
    }
    if kind is bool:
        options["action"] = "store_false" if default else "store_true"
        negated = [flag.replace("--", "--no-", 1), flag.replace("--", "--disable-", 1)]
        names = names or (negated if default else [flag])
    elif isinstance(kind, tuple):
        options |= {"type": type(kind[0]), "choices": kind}
    else:
        options["type"] = _number(field.name) if kind is int else finite if kind is float else kind
    options |= {key: meta[key] for key in ("default", "choices") if key in meta}
    group.add_argument(*(names or [flag]), **options)


def _number(name: str) -> Callable[[str], int]:
    """The whole numbers that a field can have; 0 is none of what ``_NONE_IS_0`` counts."""
    made_one_by_one = ("num_layers", "mtp_num_layers", "num_experts")
    least = 0 if name in _NONE_IS_0 else 1
    return count(least, MOST_THINGS if name in made_one_by_one else MOST_ELEMENTS)


def _kind(hint: Any) -> Any:
    """int, float, str or bool, a tuple of choices, or None for what a flag cannot say."""
    inner = [each for each in typing.get_args(hint) if each is not type(None)]
    if typing.get_origin(hint) is typing.Literal:
        return tuple(inner)
    if inner and typing.get_origin(hint) not in (list, tuple):
        return _kind(inner[0]) if len(inner) == 1 else None
    return hint if hint in (int, float, str, bool) else None


def _add_others(group: argparse._ArgumentGroup) -> None:
    table = _others()
    if "--qk-l2-norm" not in group._option_string_actions:  # a field since 0.16
        table["--qk-l2-norm"] = {"action": "store_true"}
    for flag, options in table.items():
        if not has_flag(flag):
            continue
        shown = {} if options.get("action") else {"help": "default %(default)s"}
        group.add_argument(flag, **(shown | options))


def _others() -> dict[str, dict[str, Any]]:
    """Megatron-LM's own, with what ``add_argument`` takes."""
    return {**_of_the_model(), **_of_its_ranks(), **_of_other_layers()}


def _of_the_model() -> dict[str, dict[str, Any]]:
    number, switch = {"type": count()}, {"action": "store_true"}
    return {
        "--group-query-attention": switch,
        "--swiglu": switch,
        "--quick-geglu": switch,
        "--squared-relu": switch,
        "--untie-embeddings-and-output-weights": switch,
        "--vocab-size": number,
        "--padded-vocab-size": number,
        "--make-vocab-size-divisible-by": number | {"default": 128},
        "--tokenizer-type": {"default": None},
        "--seq-length": number,
        "--max-position-embeddings": number,
        "--position-embedding-type": {
            "default": "learned_absolute",
            "choices": [
                *("learned_absolute", "rope", "mrope", "relative", "none"),
                *["yarn"] * (megatron_version()[1] >= (0, 18)),
            ],
        },
        "--use-rotary-position-embeddings": switch,
        "--no-position-embedding": switch,
        "--num-experts": {"type": _number("num_experts")},
        "--moe-layer-freq": {"type": _frequency, "default": 1},
        "--multi-latent-attention": switch,
        "--q-lora-rank": {"type": count(0)},
        "--kv-lora-rank": number | {"default": 32},
        "--qk-head-dim": number | {"default": 128},
        "--qk-pos-emb-head-dim": number | {"default": 64},
        "--v-head-dim": number | {"default": 128},
        "--transformer-impl": {
            "default": "transformer_engine",
            "choices": [
                *("local", "transformer_engine"),
                *["inference_optimized"] * (megatron_version()[1] >= (0, 16)),
            ],
        },
        "--no-pad-vocab-size": {"action": "store_false", "dest": "pad_vocab_size"},
    }


def _of_its_ranks() -> dict[str, dict[str, Any]]:
    """Pipeline stages, optimizer and buffers."""
    number, switch = {"type": count()}, {"action": "store_true"}
    return {
        "--num-layers-per-virtual-pipeline-stage": number,
        "--num-virtual-stages-per-pipeline-rank": number,
        "--decoder-first-pipeline-num-layers": {"type": count(0, MOST_THINGS)},
        "--decoder-last-pipeline-num-layers": {"type": count(0, MOST_THINGS)},
        "--pipeline-model-parallel-layout": {},
        "--use-tp-pp-dp-mapping": switch,
        "--use-distributed-optimizer": switch,
        "--num-distributed-optimizer-instances": number | {"default": 1},
        "--overlap-grad-reduce": switch,
        "--overlap-param-gather": switch,
        "--overlap-param-gather-with-optimizer-step": switch,
        "--accumulate-allreduce-grads-in-fp32": switch,
        "--grad-reduce-in-bf16": switch,
        "--ddp-bucket-size": number,
        "--ddp-num-buckets": number,
        "--ddp-pad-buckets-for-high-nccl-busbw": switch,
        "--use-megatron-fsdp": switch,
        "--use-precision-aware-optimizer": switch,
        "--optimizer-cpu-offload": switch,
        "--optimizer-cuda-graph": switch,
        "--fp8-param-gather": switch,
        "--fp4-param-gather": switch,
    }


def _of_other_layers() -> dict[str, dict[str, Any]]:
    """Flags of layers that are no attention over all tokens; see ``hybrid`` and ``gated_delta``."""
    ratio: dict[str, Any] = {"type": up_to(1), "default": 0.0}
    return {
        "--spec": {"nargs": "*"},
        "--is-hybrid-model": {"action": "store_true"},
        "--hybrid-attention-ratio": ratio,
        "--hybrid-mlp-ratio": ratio,
        "--hybrid-override-pattern": {},
        "--hybrid-layer-pattern": {},
        "--linear-attention-freq": {"type": _frequency},
    }


def _frequency(text: str) -> int | list[int]:
    """``--moe-layer-freq``: a number, or an expression of lists such as ``[0]*3+[1]*58``."""
    try:
        value = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError):
        value = None
    if isinstance(value, int) and 0 < value <= MOST_THINGS:
        return value
    if isinstance(value, list) and value and all(each in (0, 1) for each in value):
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number and no list of 0 and 1")


def _evaluated(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluated(each) for each in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _evaluated(node.left), _evaluated(node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    raise TypeError(f"{ast.dump(node)} is not of a layer pattern")
