"""The settings of Distributed Muon, validated when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

NsDtype = Literal["bf16", "fp32"]
HomePolicy = Literal["balanced", "local"]
ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]

# Keller Jordan's quintic, the iteration of the Muon post and of Moonlight:
# https://github.com/KellerJordan/Muon/blob/f90a42b28e00b8d9d2d05865fe90d9f39abcbcbd/muon.py#L5
SIMPLE_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonConfig:
    """Settings of the Muon part of a run; the defaults are Moonlight's (arXiv 2502.16982).

    lr and weight decay are not here: they come from Megatron's parameter groups, step by step.

    Attributes:
        matched_adamw_rms: root mean square that every matrix's update gets, per unit of lr: the
            direction is multiplied by ``matched_adamw_rms * sqrt(max(rows, cols))`` of the whole
            matrix (eq. 4). AdamW's updates have 0.2 to 0.4. With another ``scale_mode`` it is that
            mode's factor.
        scale_mode: what a direction is multiplied by, times ``matched_adamw_rms``, by the names of
            NVIDIA's Emerging-Optimizers; rows are a matrix's outputs, cols its inputs.
            ``spectral``: sqrt(max(rows, cols)), Moonlight's; ``unit_rms_norm``: sqrt(rows / cols);
            ``shape_scaling``: sqrt(max(1, rows / cols)).
        momentum: μ in M ← μM + G (Algorithm 1).
        nesterov: orthogonalize G + μM in place of M.
        ns_steps: Newton-Schulz iterations; the paper found 10 no better than 5.
        ns_coefficients: (a, b, c) of X ← aX + (bA + cA²)X with A = XXᵀ, the same in each step.
        ns_dtype: what matrices travel and are orthogonalized in. Products accumulate in fp32 and
            round once, in either; on CUDA as far as torch's own switches say so
            (``torch.backends.cuda.matmul``: TF32, reduced-precision reductions).
        weight_decay_all_params: decay RMSNorm gammas and biases too, and whatever else an override
            gives ``wd_mult`` 0. Off, as in Megatron; the paper (appendix D) recommends it for long
            runs.
        split_qkv: orthogonalize the Q, K and V parts of a fused QKV weight as three matrices.
        muon_include, muon_exclude: patterns of parameter names (``fnmatch``: ``*``, ``?``, ``[]``)
            that overrule the routing: Muon's even so (2-D weights only), AdamW's even so. Names are
            Megatron's, with layers and experts numbered over all pipeline stages and as on the
            first EP rank; ``megatron-muon routes`` prints them.
        homes: which rank orthogonalizes a matrix. ``balanced`` keeps the rank that holds most of
            it unless that rank's work would pass 1.05 × the ideal or the largest matrix's, if that
            is more; ``local`` always keeps it.
        checkpoint_digest: write size and checksum of every file of a checkpoint into its folder,
            and check them, and that the model is the same, before one is loaded (``digest``).

    Raises:
        TypeError: a setting is of the wrong kind.
        ValueError: a setting is negative, not finite or not one of its choices.
    """

    matched_adamw_rms: float = 0.2
    scale_mode: ScaleMode = "spectral"
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    ns_coefficients: tuple[float, float, float] = SIMPLE_COEFFICIENTS
    ns_dtype: NsDtype = "bf16"
    weight_decay_all_params: bool = False
    split_qkv: bool = True
    muon_include: tuple[str, ...] = ()
    muon_exclude: tuple[str, ...] = ()
    homes: HomePolicy = "balanced"
    checkpoint_digest: bool = True

    def __post_init__(self) -> None:
        _require_number("matched_adamw_rms", self.matched_adamw_rms)
        if self.matched_adamw_rms <= 0:
            raise ValueError(f"matched_adamw_rms must be above 0, got {self.matched_adamw_rms}")
        _require_choice("scale_mode", self.scale_mode, get_args(ScaleMode))
        _require_number("momentum", self.momentum)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if isinstance(self.ns_steps, bool) or not isinstance(self.ns_steps, int):
            raise TypeError(f"ns_steps must be an int, got {self.ns_steps!r}")
        if self.ns_steps < 1:
            raise ValueError(f"ns_steps must be at least 1, got {self.ns_steps}")
        _require_coefficients(self.ns_coefficients)
        for name in ("nesterov", "weight_decay_all_params", "split_qkv", "checkpoint_digest"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        _require_choice("ns_dtype", self.ns_dtype, ("bf16", "fp32"))
        for name in ("muon_include", "muon_exclude"):
            _require_patterns(name, getattr(self, name))
        _require_choice("homes", self.homes, ("balanced", "local"))


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def _require_coefficients(value: object) -> None:
    if not isinstance(value, tuple) or len(value) != 3:
        raise TypeError(f"ns_coefficients must be a tuple of three numbers, got {value!r}")
    for coefficient in value:
        _require_number("ns_coefficients", coefficient)


def _require_patterns(name: str, value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(pattern, str) for pattern in value):
        raise TypeError(f"{name} must be a tuple of patterns, got {value!r}")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
