"""For each setting a value that differs from the default, and some that are errors."""

from __future__ import annotations

import math
from typing import Any

from megatron_muon.settings.rules import RULES

# Another value than the default, which is valid by itself.
OTHERS: dict[str, Any] = {
    "matched_adamw_rms": 0.3,
    "scale_mode": "shape_scaling",
    "rule": "hyperball",
    "radii": (("*.linear_fc1.weight", 2.0),),
    "moment2_beta2": 0.9,
    "moment2_eps": 1e-6,
    "full_period": 5,
    "block_lr_mult": 0.5,
    "momentum": 0.9,
    "momentum_warmup": 3,
    "momentum_start": 0.5,
    "nesterov": False,
    "ns_steps": 6,
    "ns_coefficients": "quintic",
    "preset": "fast",
    "ns_iteration": "standard",
    "ns_dtype": "fp32",
    "ns_batch": 2,
    "elementwise": "foreach",
    "momentum_dtype": "int8",
    "symmetric_products": "triton",
    "clip_scope": "adamw",
    "weight_decay_all_params": True,
    "cautious_decay": True,
    "independent_decay": True,
    "lr_mults": (("output_layer.weight", 2.0),),
    "wd_mults": (("output_layer.weight", 2.0),),
    "by_pattern": ("*.linear_fc1.weight:lr=0.003,ns_steps=8",),
    "qk_clip": 100.0,
    "qk_clip_alpha": 0.25,
    "split_qkv": False,
    "splits": (("*.linear_qkv.weight", "whole"),),
    "muon_include": ("output_layer.weight",),
    "muon_exclude": ("*.linear_fc1.weight",),
    "homes": "local",
    "split_matrices": 2,
    "node_ranks": 4,
    "round_bytes": 1 << 20,
    "checkpoint_digest": False,
    "nonfinite_limit": 5,
    "log_interval": 2,
}
# What needs another setting beside it.
WITH: dict[str, dict[str, Any]] = {
    "radii": {"rule": "hyperball"},
    "momentum_start": {"momentum_warmup": 3},
}
WITH |= {key: {"rule": "normuon"} for key in ("moment2_beta2", "moment2_eps")}
WITH |= {"qk_clip_alpha": {"qk_clip": 100.0}, "block_lr_mult": {"full_period": 5}}

_RANGE = r"must be from 1e-09 to 1e\+09, got "
_POSITIVE = (
    (-0.2, _RANGE),
    (0, _RANGE),
    (math.nan, _RANGE),
    (math.inf, _RANGE),
    (True, "number"),
)
_MOMENTUM = (
    (-0.1, r"must be in \[0, 1\), got -0.1"),
    (1.0, r"must be in \[0, 1\), got 1.0"),
    (math.inf, r"must be in \[0, 1\), got inf"),
    (True, "must be a number, got True"),
)
_COUNT = (
    (0, "at least 1, got 0"),
    (2.5, "must be an int, got 2.5"),
    (True, "must be an int"),
)
_SWITCH = ((1, "must be True or False, got 1"), ("no", "must be True or False"))
_PATTERNS = (
    ("a.*", "must be a tuple of patterns"),
    ((1,), "must be a tuple of patterns"),
)
_PAIRS = (
    ("a", r"must be a tuple of \(pattern, "),
    ((("a",),), r"must be a tuple of \(pattern, "),
)
_MULTIPLIERS = (
    *_PAIRS,
    ((("a", -1.0),), "from 0 to"),
    ((("a", "2"),), "must be a number"),
)
# Values that it cannot have, each with what the error says after field and flag.
BAD: dict[str, tuple[tuple[Any, str], ...]] = {
    "matched_adamw_rms": (*_POSITIVE, ("0.2", "must be a number, got '0.2'")),
    "rule": (("sphere", f"of {', '.join(RULES)}, or MODULE:NAME, got 'sphere'"),),
    "radii": (
        *_PAIRS,
        ((("a", 0.0),), "a radius"),
        ((("a", math.inf),), "a radius"),
        ((("a", "2"),), "must be a number"),
    ),
    "moment2_beta2": ((1.0, r"must be in \[0, 1\), got 1.0"),),
    "moment2_eps": ((0.0, r"must be in \[1e-16, 1\], got 0.0"),),
    "full_period": _COUNT,
    "block_lr_mult": _POSITIVE,
    "momentum": _MOMENTUM,
    "momentum_warmup": _COUNT,
    "momentum_start": _MOMENTUM,
    "nesterov": _SWITCH,
    "ns_steps": (*_COUNT, (10**9, "must be at most 100, got 1000000000")),
    "ns_coefficients": (
        ((1.0, 2.0), "must be a tuple of three numbers"),
        ("septic", "must be one of simple, quintic, .*got 'septic'"),
        ({1.0, 2.0}, "a set's name, a tuple of three numbers"),
        (((1.0, 2.0, 3.0), (1.0,)), "must be a tuple of three"),
        ((), r"three numbers, got \(\)"),
        ((1.0, 2.0, math.inf), "must be finite"),
    ),
    "ns_batch": _COUNT,
    "momentum_dtype": (
        ("fp8", "must be one of fp32, int8, got 'fp8'"),
        ("bf16", "bf16 was removed: give int8, which is smaller, or with"),
    ),
    "weight_decay_all_params": _SWITCH,
    "by_pattern": (
        ("a:lr=1", "must be a mapping from a pattern to its settings"),
        (("a",), "must be PATTERN:KEY=VALUE,..., got 'a'"),
        ((":lr=1",), "must be PATTERN:KEY=VALUE,..., got ':lr=1'"),
        ({"a": 0.1}, "'a' must have a mapping of settings, got 0.1"),
        ({"a": {}}, "'a' must have a mapping of settings"),
        (("a:lr",), "'lr' is no setting by pattern"),
        ({"a": {"rate": 1.0}}, "'rate=1.0' is no setting by pattern.*of lr, min_lr"),
        (("a:lr=1,ns_steps=6,lr=2",), "lr is given twice"),
        ({"a": {"lr": math.inf}}, "lr must be from 0 to .*got inf"),
        (("a:weight_decay=nan",), "weight_decay must be from 0 to .*got nan"),
        (("a:lr=fast",), "lr must be a number, got 'fast'"),
        (("a:min_lr=2,lr=1",), "min_lr 2.0 is above lr 1.0"),
        (("a:momentum=1",), r"momentum must be in \[0, 1\), got 1.0"),
        ({"a": {"ns_steps": 101}}, "ns_steps must be at most 100"),
        ({"a": {"ns_steps": 2.5}}, "ns_steps must be a number, got '2.5'"),
        (("a:ns_coefficients=1,2",), "coefficients are a name or a,b,c"),
        (("a:ns_steps=6,ns_coefficients=deepseekv4",), "a:ns_steps=6,.*has 10 steps"),
        (("a:scale_mode=max,rms=1",), "scale_mode must be one of spectral"),
        (("a:scale_mode=spectral",), "scale_mode spectral needs the factor"),
        (("a:rule=muon",), "'rule=muon' is no setting by pattern"),
    ),
    "cautious_decay": _SWITCH,
    "independent_decay": _SWITCH,
    "lr_mults": _MULTIPLIERS,
    "wd_mults": _MULTIPLIERS,
    "qk_clip": _POSITIVE,
    "qk_clip_alpha": (
        (0, r"must be in \(0, 1\), got 0"),
        (1.0, r"must be in \(0, 1\), got 1.0"),
    ),
    "split_qkv": _SWITCH,
    "splits": (
        *_PAIRS,
        ((("a", "rows"),), "must be one of whole, qkv, heads, gate-up, parts"),
    ),
    "muon_include": _PATTERNS,
    "muon_exclude": _PATTERNS,
    "split_matrices": (
        (1, "must be at least 2, got 1"),
        (65, "must be at most 64, got 65"),
        ("on", "must be an int, got 'on'"),
    ),
    "node_ranks": _COUNT,
    "round_bytes": _COUNT,
    "checkpoint_digest": _SWITCH,
    "nonfinite_limit": _COUNT,
    "log_interval": _COUNT,
}
# Settings that are one of some words, which an error lists.
_WORDS = """
scale_mode: spectral, unit_rms_norm, shape_scaling, update_norm
preset: safe, fast
ns_iteration: standard, gram, auto
ns_dtype: bf16, fp16, fp32
elementwise: auto, foreach
symmetric_products: auto, triton, torch
clip_scope: all, adamw
homes: balanced, local
"""
for _line in _WORDS.strip().splitlines():
    _name, _words = _line.split(": ")
    BAD[_name] = (("bold", f"must be one of {_words}, got 'bold'"),)
