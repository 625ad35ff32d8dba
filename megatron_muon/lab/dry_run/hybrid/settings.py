"""Settings of a hybrid model from flags: Mamba, attention, MLP and MoE layers in a pattern.

Sources: ``validate_args`` of megatron/training/arguments.py, mamba_builders.py and
hybrid_builders.py, at core_v0.12.3 to core_v0.19.0 and main. Up to 0.16 the pattern follows from
ratios or --hybrid-override-pattern. Later it is --hybrid-layer-pattern, which has pipeline stages
and layers of multi-token prediction in it, too.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Any

_FILES = ("mamba.mamba_layer_specs", "hybrid.hybrid_layer_specs")
# A run's --spec: Megatron's own layers, of which the local ones are built here.
SPECS = {
    (f"megatron.core.models.{file}", f"{name}_stack_spec")
    for file in _FILES
    for name in ("mamba", "hybrid")
}
_SPARSE = "D"  # a layer of DeepSeek's sparse attention
_LATENT = "+"
_MTP = "/"
# Flags that say where layers are, which a pattern says by its | signs.
_LAYOUT = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def is_hybrid(flags: Namespace) -> bool:
    """Whether a run with these flags trains a hybrid model.

    Raises:
        ValueError: --spec names layers that are not built here.
    """
    spec = tuple(getattr(flags, "spec", None) or ())
    if spec and spec not in SPECS:
        known = ", or ".join(sorted(" ".join(names) for names in SPECS))
        raise ValueError(
            f"--spec {' '.join(spec)} is not supported: the layers that are built here are GPT's, "
            f"without --spec, and a hybrid model's: {known}"
        )
    said = ("is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern")
    ratios = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
    return bool(spec) or any(getattr(flags, name, None) for name in (*said, *ratios))


def settle(flags: Namespace) -> None:
    """Set what a pattern says: the number of layers, of MTP's, and latent attention. Twice is once.

    Raises:
        ValueError: flags that cannot be together, or a pattern that cannot be built here.
    """
    if not is_hybrid(flags):
        return
    for name in _LAYOUT:
        if getattr(flags, name, None):
            raise ValueError(
                f"--{name.replace('_', '-')} cannot be given with a hybrid model: Megatron divides "
                "its layers evenly, or by the | signs of --hybrid-layer-pattern"
            )
    if getattr(flags, "experimental_attention_variant", None):
        raise ValueError(
            "--experimental-attention-variant cannot be given with a hybrid model here: name its "
            "layers in --hybrid-layer-pattern"
        )
    if hasattr(flags, "hybrid_layer_pattern"):
        _settle_pattern(flags)
    elif flags.mtp_num_layers:
        raise ValueError("--mtp-num-layers: hybrid models of this megatron-core have none")


def chunks(flags: Namespace) -> int | None:
    """Model chunks of a rank, None for one; of a hybrid model."""
    pattern = getattr(flags, "hybrid_layer_pattern", None)
    stages = flags.pipeline_model_parallel_size
    segments = _allocation().get_hybrid_total_pipeline_segment_count(pattern) if pattern else 1
    if segments == 1 or segments == stages:
        return None
    if segments % stages:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern!r} has {segments} segments between its | signs, "
            f"which are not divided evenly over {stages} pipeline stages"
        )
    return int(segments // stages)


def _settle_pattern(flags: Namespace) -> None:
    """``--hybrid-layer-pattern``, since 0.17."""
    if flags.hybrid_layer_pattern and flags.hybrid_override_pattern:
        raise ValueError(
            "--hybrid-override-pattern is an older name of --hybrid-layer-pattern: give one of them"
        )
    pattern = flags.hybrid_layer_pattern or flags.hybrid_override_pattern
    if not pattern:
        raise ValueError("--hybrid-layer-pattern needed: a hybrid model's layers follow from it")
    later = flags.mtp_hybrid_override_pattern
    if later and flags.mtp_num_layers and _MTP not in pattern:
        pattern += _MTP + _MTP.join([later] * flags.mtp_num_layers)
    if _SPARSE in pattern:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern!r}: layers {_SPARSE!r}, sparse attention, are not "
            "supported: Megatron makes their indexer of Transformer Engine's modules only"
        )
    parsed = _allocation().parse_hybrid_pattern(pattern)
    flags.hybrid_layer_pattern, flags.hybrid_override_pattern = pattern, None
    flags.mtp_hybrid_override_pattern = None
    flags.num_layers = _allocation().get_hybrid_total_layer_count(pattern)
    flags.mtp_num_layers = parsed.mtp_num_depths or None
    if _LATENT in pattern:
        flags.multi_latent_attention = True


def _allocation() -> Any:
    """Megatron's module that reads patterns: in the hybrid models' folder since 0.18."""
    try:
        return importlib.import_module("megatron.core.models.hybrid.hybrid_layer_allocation")
    except ModuleNotFoundError:
        return importlib.import_module("megatron.core.ssm.mamba_hybrid_layer_allocation")
