"""The number of matrices in each of Muon's parameters, from the arguments in a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron_muon.files.pickles.objects import Unknown
from megatron_muon.lab.inspect.tensors import canonical

# Caps on the sizes of a model that is built here: those in a damaged file could take for ever.
_MOST = {
    "num_attention_heads": 1 << 12,
    "num_query_groups": 1 << 12,
    "num_experts": 1 << 12,
    "mtp_num_layers": 1 << 6,
    "world_size": 1 << 17,
    **dict.fromkeys(("seq_length", "max_position_embeddings", "ddp_bucket_size"), 1 << 40),
}
_MOST_ELSE = 1 << 24
_MOST_TEXT = 1000  # characters
# Arguments of models whose matrices are not counted here.
_OTHER_MODELS = (
    *("is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern", "spec"),
    *("experimental_attention_variant", "heterogeneous_layers_config_path"),
    *("pipeline_model_parallel_layout", "yaml_cfg"),
)


def matrices_by_name(
    args: argparse.Namespace, settings: Mapping[str, Any], parameters: int
) -> tuple[dict[str, int], str | None]:
    """Count matrices as ``megatron-muon routes`` does, by building the model without memory.

    Args:
        args: Megatron-LM's arguments, as saved.
        settings: settings of MuonConfig, by name.
        parameters: number of parameters in the checkpoint; a cap on the model's layers.

    Returns:
        The number of matrices by parameter name; and the reason if there are none, or None.
    """
    from megatron_muon.lab.routes.model_flags import megatron_is_quiet

    try:
        with megatron_is_quiet():
            return _matrices(args, settings, parameters), None
    except (Exception, SystemExit) as error:  # the model cannot be built: not a fault of the files
        text = str(error).splitlines()[0] if str(error) else ""
        return {}, f"{type(error).__name__}: {text}"


def _matrices(
    args: argparse.Namespace, settings: Mapping[str, Any], parameters: int
) -> dict[str, int]:
    import megatron_muon

    if not megatron_muon.cpu.enabled():
        megatron_muon.cpu.enable(allow_cuda=True)  # nothing here runs on a device
    from megatron_muon.lab.dry_run.flags import add_megatron_flags
    from megatron_muon.lab.routes.parameters import routes

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--world-size", type=int)
    add_megatron_flags(parser)
    flags = parser.parse_args([])
    _take(flags, parser, args)
    _require_possible(flags, parameters)
    flags.transformer_impl = "local"  # the same matrices, and it needs no other package
    known: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    routed = routes(flags, megatron_muon.MuonConfig(**known))
    return {
        canonical(row.name): len(row.matrices)
        for stage in routed.stages
        for row in stage.rows
        if row.optimizer == "muon"
    }


def _take(
    flags: argparse.Namespace, parser: argparse.ArgumentParser, args: argparse.Namespace
) -> None:
    """Copy the saved arguments into the flags of the same names.

    Raises:
        ValueError: a value cannot come from the flag's parser.
    """
    actions = {action.dest: action for action in parser._actions}
    for name in _OTHER_MODELS:
        if getattr(args, name, None):
            raise ValueError(f"the argument {name} is of a model whose matrices are not counted")
    for name, value in vars(args).items():
        action = actions.get(name)
        if action is None or not hasattr(flags, name) or isinstance(value, Unknown):
            continue
        if value is not None and not _fits(action, value):
            raise ValueError(f"the argument {name} is {repr(value)[:100]}, which it cannot be")
        setattr(flags, name, value)


def _fits(action: argparse.Action, value: Any) -> bool:
    if action.nargs == 0:
        return isinstance(value, bool)
    if action.choices is not None:
        return value in action.choices
    if action.dest == "moe_layer_freq":
        return type(value) is int or _is_pattern(value)
    if action.type not in (None, str):  # a kind of number
        return type(value) in (int, float) and abs(value) <= _MOST.get(action.dest, _MOST_ELSE)
    return isinstance(value, str) and len(value) <= _MOST_TEXT


def _is_pattern(value: Any) -> bool:
    return isinstance(value, list) and all(each in (0, 1) for each in value)


def _require_possible(flags: argparse.Namespace, parameters: int) -> None:
    """Refuse models that would take for ever: more layers or stages than parameters, or too many
    experts."""
    for name in ("num_layers", "pipeline_model_parallel_size"):
        size = getattr(flags, name) or 0
        if size > parameters:
            raise ValueError(f"the argument {name} is {size}, for {parameters} parameters")
    if (flags.num_layers or 0) * (flags.num_experts or 0) > _MOST["world_size"]:
        raise ValueError(f"{flags.num_layers} layers of {flags.num_experts} experts are too many")
