"""Bare parsers that declare what each Megatron-LM declares, and what Muon's flags mean
on them.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Any

import pytest

from megatron_muon import MuonConfig
from megatron_muon.megatron_lm.flags.parser import add_flags
from megatron_muon.settings.config import ROWS
from megatron_muon.settings.flags import muon_config
from support.settings import OTHERS

# megatron/training/arguments.py at core_v0.12.0 (as until 0.15.3), 0.16.1, 0.17.1,
# 0.19.0 (as 0.18.2), and after it; what is new in each.
_SCALE_MODES = ["spectral", "unit_rms_norm", "shape_scaling"]
_TP_MODES = ["blockwise", "duplicated", "distributed"]
_V16: dict[str, dict[str, Any]] = {
    "--muon-momentum": {"type": float, "default": 0.9},
    "--muon-no-split-qkv": {
        "action": "store_false",
        "default": True,
        "dest": "muon_split_qkv",
    },
    "--muon-use-nesterov": {"action": "store_true"},
    "--muon-scale-mode": {"type": str, "default": "spectral", "choices": _SCALE_MODES},
    "--muon-fp32-matmul-prec": {
        "type": str,
        "default": "medium",
        "choices": ["low", "medium", "high"],
    },
    "--muon-num-ns-steps": {"type": int, "default": 5},
    "--muon-tp-mode": {"type": str, "default": "blockwise", "choices": _TP_MODES},
    "--muon-extra-scale-factor": {"type": float, "default": 1.0},
}
_V17 = {
    **_V16,
    "--muon-coefficient-type": {"type": str, "default": "quintic"},
    "--muon-scalar-optimizer": {
        "type": str,
        "default": "adam",
        "choices": ["adam", "lion"],
    },
}
_V19 = {
    **{
        option: keywords
        for option, keywords in _V17.items()
        if option != "--muon-use-nesterov"
    },
    "--muon-nesterov": {"action": "store_true"},
}
_LATER = {
    **_V19,
    "--muon-use-syrk": {"action": "store_true"},
    "--muon-tp-mode": {"type": str, "default": "duplicated", "choices": _TP_MODES},
}
DECLARED = {"0.12": {}, "0.16": _V16, "0.17": _V17, "0.19": _V19, "later": _LATER}
OPTIMIZERS = {
    "0.12": ["adam", "sgd"],
    "0.16": ["adam", "sgd", "muon", "dist_muon"],
    "0.17": ["adam", "sgd", "muon", "dist_muon", "lion"],
}
EVERY = pytest.mark.parametrize("version", DECLARED)
WITH_MUON = pytest.mark.parametrize("version", ["0.16", "0.17", "0.19", "later"])
# What is given, and the settings that it stands for.
MEANINGS: dict[str, Any] = {
    "--muon-matched-adamw-rms 0.4": {"matched_adamw_rms": 0.4},
    "--muon-extra-scale-factor 0.4": {"matched_adamw_rms": 0.4},
    "--muon-ns-steps 7": {"ns_steps": 7},
    "--muon-num-ns-steps 7": {"ns_steps": 7},
    "--no-muon-nesterov": {"nesterov": False},
    "--muon-nesterov": {"nesterov": True},
    "--muon-use-nesterov": {"nesterov": True},
    "--muon-scale-mode spectral": {"scale_mode": "spectral"},
    "--muon-scale-mode unit_rms_norm": {
        "scale_mode": "unit_rms_norm",
        "matched_adamw_rms": 1.0,
    },
    "--muon-scale-mode shape_scaling --muon-extra-scale-factor 0.3": {
        "scale_mode": "shape_scaling",
        "matched_adamw_rms": 0.3,
    },
    "--muon-scale-mode update_norm --muon-matched-adamw-rms 0.3": {
        "scale_mode": "update_norm",
        "matched_adamw_rms": 0.3,
    },
    "--muon-coefficient-type simple": {},
    "--muon-coefficient-type quintic": {"ns_coefficients": "quintic"},
    "--muon-ns-coefficients polar_express --muon-coefficient-type polar_express": {
        "ns_coefficients": "polar_express"
    },
    "--muon-ns-coefficients 3.4445,-4.775,2.0315;2,-1.5,0.5": {
        "ns_coefficients": ((3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5))
    },
    "--muon-ns-coefficients 3.4445,-4.775,2.0315": {},
    "--muon-coefficient-type custom --muon-ns-coefficients 2,-1.5,0.5": {
        "ns_coefficients": ((2.0, -1.5, 0.5),)
    },
    "--muon-ns-iteration auto": {"ns_iteration": "auto"},
    "--muon-symmetric-products torch": {"symmetric_products": "torch"},
    "--muon-rule normuon --muon-moment2-beta2 0.9": {
        "rule": "normuon",
        "moment2_beta2": 0.9,
    },
    "--muon-rule normuon --muon-moment2-eps 1e-6": {
        "rule": "normuon",
        "moment2_eps": 1e-6,
    },
    "--muon-rule a.module:rule": {"rule": "a.module:rule"},
    "--muon-rule hyperball --muon-radius *.linear_fc1.*=2.5": {
        "rule": "hyperball",
        "radii": (("*.linear_fc1.*", 2.5),),
    },
    "--muon-momentum-dtype int8": {"momentum_dtype": "int8"},
    "--muon-ns-dtype fp16": {"ns_dtype": "fp16"},
    "--muon-no-split-qkv": {"split_qkv": False},
    "--weight-decay-all-params": {"weight_decay_all_params": True},
    "--muon-split *.linear_qkv.*=heads --muon-split a=b=gate-up": {
        "splits": (("*.linear_qkv.*", "heads"), ("a=b", "gate-up"))
    },
    "--muon-lr-mult embedding.*=0.5 --muon-lr-mult a=b=2e-1": {
        "lr_mults": (("embedding.*", 0.5), ("a=b", 0.2))
    },
    "--muon-wd-mult *.router.*=0": {"wd_mults": (("*.router.*", 0.0),)},
    "--muon-for *.linear_fc2.*:ns_coefficients=2,-1.5,.5,lr=3e-4 --muon-for *.linear_qkv.weight[v]:ns_steps=8": {
        "by_pattern": {
            "*.linear_fc2.*": {"lr": 3e-4, "ns_coefficients": (2, -1.5, 0.5)},
            "*.linear_qkv.weight[v]": {"ns_steps": 8},
        }
    },
    "--muon-qk-clip-alpha 0.3 --muon-qk-clip 30": {
        "qk_clip": 30.0,
        "qk_clip_alpha": 0.3,
    },
    "--muon-block-lr-mult 0.5 --muon-full-period 5": {
        "block_lr_mult": 0.5,
        "full_period": 5,
    },
    "--muon-cautious-decay --muon-independent-decay": {
        "cautious_decay": True,
        "independent_decay": True,
    },
    "--muon-momentum-start 0.5 --muon-momentum-warmup 300": {
        "momentum_start": 0.5,
        "momentum_warmup": 300,
    },
    "--muon-include a.* --muon-include b": {"muon_include": ("a.*", "b")},
    "--muon-exclude *.router.weight": {"muon_exclude": ("*.router.weight",)},
    "--muon-split-matrices auto": {"split_matrices": "auto"},
    "--muon-split-matrices off": {"split_matrices": "off"},
    "--muon-dp-layout bucketed": {},
    "--muon-round-mib 64": {"round_bytes": 64 << 20},
    "--muon-ns-dtype auto": {"ns_dtype": None},
    "--no-muon-checkpoint-digest": {"checkpoint_digest": False},
    "--muon-log-interval 100": {"log_interval": 100},
    "--muon-from-adamw momentum": {},
    "--muon-backend plugin": {},
    "--muon-cpu": {},
    "--muon-ns-steps 7 --muon-num-ns-steps 7": {"ns_steps": 7},
}
MEANINGS |= {
    f"{ROWS[name].flags[0].option} {OTHERS[name]}": {name: OTHERS[name]}
    for name in """
        momentum preset ns_dtype ns_batch elementwise clip_scope qk_clip homes
        split_matrices node_ranks nonfinite_limit
    """.split()
}


def parser_of(version: str, **more: dict[str, Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    choices = OPTIMIZERS.get(version, [*OPTIMIZERS["0.17"], "soap", "adaptive_muon"])
    parser.add_argument("--optimizer", default="adam", choices=choices)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--expert-tensor-parallel-size", type=int, default=None)
    for option, keywords in {**DECLARED[version], **more}.items():
        parser.add_argument(option, **keywords)
    return parser


def parsed(version: str, *given: str) -> Namespace:
    """What a version makes of flags, each text of one or several words."""
    parser = parser_of(version)
    add_flags(parser)
    return parser.parse_args(" ".join(given).split())


def config_of(version: str, *given: str) -> MuonConfig:
    return muon_config(parsed(version, *given))
