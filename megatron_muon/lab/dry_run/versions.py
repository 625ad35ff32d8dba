"""The flags and parameters of the installed megatron-core that differ by its version."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from megatron_muon.mcore.seams.rows import NEWEST, OLDEST, Version, megatron_version

_SINCE = {
    13: "--mamba-num-heads --qk-l2-norm --pipeline-model-parallel-layout",
    14: "--padded-vocab-size --use-megatron-fsdp --use-fused-weighted-squared-relu",
    15: "--quick-geglu --fp4-param-gather --softmax-type --glu-linear-offset "
    "--activation-func-clamp-value",
    16: "--experimental-attention-variant --linear-attention-freq --attention-output-gate "
    "--moe-latent-size --moe-shared-expert-gate --mtp-standalone "
    "--linear-conv-kernel-dim --linear-key-head-dim --linear-num-key-heads "
    "--linear-num-value-heads --linear-value-head-dim --moe-enable-routing-replay --qk-clip",
    17: "--hybrid-layer-pattern --optimizer-cuda-graph --mtp-use-repeated-layer "
    "--mtp-hybrid-override-pattern --use-mup "
    "--mup-attn-scale-power --mup-base-head-dim --mup-base-hidden-size --mup-embedding-mult "
    "--mup-output-mult --mup-width-mult",
    18: "--no-pad-vocab-size --moe-mlp-glu-interleave-size --moe-single-grouped-bias "
    "--moe-single-grouped-weight --moe-expert-rank-capacity-factor",
    19: "--mtp-detach-heads --moe-shared-expert-glu-interleave-size "
    "--moe-router-quantile-balancing-ema",
    20: "--enable-mhc-connections --mhc-init-gating-factor --mhc-num-residual-streams "
    "--mhc-sinkhorn-iterations --moe-use-grouped-tensor --mtp-hsm",
}
_UNTIL = {
    16: "--hybrid-attention-ratio --hybrid-mlp-ratio --moe-extended-tp "
    "--moe-use-legacy-grouped-gemm"
}
# Flags read here that not every version has: the first and the last that has it.
# From Megatron-LM's parsers at core_v0.12.3 to core_v0.19.0 and main.
RANGES: dict[str, tuple[Version, Version]] = {
    **{flag: ((0, minor), NEWEST) for minor, text in _SINCE.items() for flag in text.split()},
    **{flag: (OLDEST, (0, minor)) for minor, text in _UNTIL.items() for flag in text.split()},
}


def has_flag(flag: str) -> bool:
    """Whether the Megatron-LM of the installed version has a flag."""
    first, last = RANGES.get(flag, (OLDEST, NEWEST))
    return first <= megatron_version()[1] <= last


def why_lacked(flag: str) -> str:
    """The error for a flag of ``RANGES`` that is given to a version without it."""
    first, last = RANGES[flag]
    which = f"since 0.{first[1]}" if last == NEWEST else f"up to 0.{last[1]}"
    return f"megatron-core {megatron_version()[0]} has no {flag}: versions {which} have it"


def having(made: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """The options that ``made``, a function or a dataclass, has in this version.

    Raises:
        ValueError: an option that it lacks is not off.
    """
    if dataclasses.is_dataclass(made):
        known = {field.name for field in dataclasses.fields(made)}
    else:
        known = set(inspect.signature(made).parameters)
    for name in options.keys() - known:
        if options[name]:
            raise ValueError(
                f"{made.__name__} of megatron-core {megatron_version()[0]} has no {name}, got "
                f"{options[name]!r}"
            )
    return {name: value for name, value in options.items() if name in known}
