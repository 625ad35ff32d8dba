"""Settings of Megatron's own Muon from Python: fields of OptimizerConfig, and
config_overrides.

Fields are read as the flags of the same names. ``dist_muon`` is a name of Megatron's
alone, so with it all fields count; ``muon`` is also the plugin's, so there only those
unlike the core's default do.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.core.utils import get_model_config

from megatron_muon.mcore.routing.param_routing import weights
from megatron_muon.mcore.wiring.validate import own_muons_fields
from megatron_muon.runtime.collectives import all_gather_json
from megatron_muon.settings.config import ROWS, MuonConfig
from megatron_muon.settings.flags import (
    KEPT,
    TP_MODES,
    muon_config,
    tp_size,
    upstream_settings,
)
from megatron_muon.settings.kinds import choice
from megatron_muon.settings.rows import UPSTREAM
from megatron_muon.settings.rules import row_of

# Settings that Megatron's own Muon has, too; ns_dtype is its muon_fp32_matmul_prec.
_SHARED = {"ns_dtype"} | {
    field
    for field, row in ROWS.items()
    if any(flag.source == UPSTREAM for flag in row.flags)
}
_PRECISION = "muon_fp32_matmul_prec"
_DTYPES = {"medium": "bf16", "highest": "fp32"}  # by torch's words
Asked = dict[str, list[str]]
_PATTERNS_OF = {"adam": "muon_exclude", "muon": "muon_include"}


def with_fields(
    config: MuonConfig, optimizer_config: Any, changed: Mapping[str, Any], chunk: Any
) -> tuple[MuonConfig, list[str]]:
    """The settings of ``install()`` with those of the fields that count, and lines to
    print.

    ``changed`` are the ``fields_set`` of Megatron's config; ``chunk`` is one of the
    model's.

    Raises:
        ValueError: a field has no meaning here, or ``install()`` got one of Muon's
            settings, too.
    """
    optimizer = optimizer_config.optimizer
    is_theirs = optimizer != "muon"
    if not changed and not is_theirs:
        return config, []
    _refuse_twice(config, changed or {"optimizer": optimizer})
    defaults = own_muons_fields(optimizer_config)
    given: dict[str, Any] = {}
    if is_theirs:
        given = {name: defaults[name] for name in ("muon_tp_mode", _PRECISION)}
        for field, flag, value in upstream_settings(defaults):
            if field not in row_of(config.rule).refuses:
                given[flag.dest] = value
    given |= changed
    mode = given.pop("muon_tp_mode", "duplicated")
    precision = given.pop(_PRECISION, None)
    given["muon_ns_dtype"] = _DTYPES.get(precision, precision)
    args = Namespace(**{**given, KEPT: defaults, "muon_rule": config.rule})
    try:
        choice(TP_MODES).check("muon_tp_mode", mode)
        theirs = muon_config(args)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"muon_* fields of OptimizerConfig, here as flags: {error}"
        ) from error
    config = replace(config, **{name: getattr(theirs, name) for name in _SHARED})
    counting = f": {', '.join(changed)}"
    if is_theirs:
        counting = f", all of them ({optimizer})"
    lines = [
        f"settings by muon_* fields of OptimizerConfig{counting}: scale "
        f"{config.matched_adamw_rms:g} × {config.scale_mode}, momentum "
        f"{config.momentum:g}, Nesterov {'on' if config.nesterov else 'off'}, QKV "
        f"{'split' if config.split_qkv else 'whole'}"
    ]
    shared_by = tp_size(get_model_config(chunk))
    if mode == "blockwise" and shared_by > 1:
        lines.append(
            "warning: muon_tp_mode='blockwise', in Megatron's own Muon, is other "
            f"mathematics with TP {shared_by}: each rank's slice by itself; here "
            "every matrix is orthogonalized whole, as by duplicated"
        )
    return config, lines


def _refuse_twice(config: MuonConfig, changed: Mapping[str, Any]) -> None:
    twice = [
        f"{name}={getattr(config, name)!r}" for name in sorted(config.given & _SHARED)
    ]
    if twice:
        named = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        raise ValueError(
            f"install(MuonConfig({', '.join(twice)})) beside OptimizerConfig.{named}: "
            "both configure Muon's update; leave these out of MuonConfig, or write "
            "optimizer='muon' and leave every muon_* field at Megatron's default"
        )


def routes_asked(overrides: Mapping[Any, Any], model_chunks: Sequence[Any]) -> Asked:
    """Names of the weights here whose optimizer ``config_overrides`` name, by the
    setting that routes them.
    """
    local = {}
    for chunk in model_chunks:
        for name, param in chunk.named_parameters():
            local[param] = name
    trained = [weight for weight in weights(model_chunks) if weight.param.requires_grad]
    asked: Asked = {setting: [] for setting in _PATTERNS_OF.values()}
    for key, override in overrides.items():
        optimizer = override.get("optimizer")
        if optimizer not in (None, *_PATTERNS_OF):
            raise ValueError(
                f"config_overrides asks for the optimizer {optimizer!r} of {key}: here "
                "weights are 'muon' or 'adam', which is AdamW"
            )
        for weight in trained if optimizer else ():
            if key.matches(weight.param, local[weight.param]):
                asked[_PATTERNS_OF[optimizer]].append(weight.name)
    return asked


def routed(config: MuonConfig, asked: Asked) -> MuonConfig:
    """The settings with the names that any rank's ``routes_asked`` has; all ranks call
    it.
    """
    patterns: dict[str, Any] = {}
    ranks = all_gather_json(asked, None)
    for setting in _PATTERNS_OF.values():
        names = set().union(*(rank[setting] for rank in ranks))
        patterns[setting] = (*getattr(config, setting), *sorted(names))
    return replace(config, **patterns)
