"""How many matrices each of Muon's parameters holds, from the arguments that a checkpoint has."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron_muon.cli.checkpoint_pickle import Unknown
from megatron_muon.cli.checkpoint_tensors import canonical


def matrices_by_name(
    args: argparse.Namespace, settings: Mapping[str, Any]
) -> tuple[dict[str, int], str | None]:
    """As ``megatron-muon routes`` finds them, by building the model without memory.

    Args:
        args: Megatron-LM's, as saved.
        settings: of MuonConfig.

    Returns:
        By name; and why there are none, or None.
    """
    from megatron_muon.cli.routes import megatron_is_quiet

    try:
        with megatron_is_quiet():
            return _matrices(args, settings), None
    except (Exception, SystemExit) as error:  # a model that it cannot build: no fault of the files
        text = str(error).splitlines()[0] if str(error) else ""
        return {}, f"{type(error).__name__}: {text}"


def _matrices(args: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, int]:
    import megatron_muon

    if not megatron_muon.cpu.enabled():
        megatron_muon.cpu.enable(allow_cuda=True)  # nothing here runs on a device
    from megatron.core.transformer import TransformerConfig

    from megatron_muon.cli.flags import add_megatron_flags
    from megatron_muon.cli.stages import routes

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--world-size", type=int)
    add_megatron_flags(parser, TransformerConfig)
    flags = parser.parse_args([])
    for name, value in vars(args).items():
        if hasattr(flags, name) and not isinstance(value, Unknown):
            setattr(flags, name, value)
    flags.transformer_impl = "local"  # the same matrices, and it needs no other package
    known: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    found = routes(flags, megatron_muon.MuonConfig(**known))
    return {
        canonical(row.name): len(row.matrices)
        for stage in found.stages
        for row in stage.rows
        if row.optimizer == "muon"
    }
