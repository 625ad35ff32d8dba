"""Every parameter of a model with its name and module, and whose it is: Muon's or AdamW's.

2-D weights of the module types in ``MATRIX_MODULES`` are Muon's unless they are an embedding or the
output layer; all else is AdamW's. Those two are known by Megatron's mark
``is_embedding_or_output_parameter``, by the class of their module or by name. The patterns
``muon_include`` and ``muon_exclude`` overrule all of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.utils import get_model_config

from megatron_muon.config import MuonConfig

# Modules whose 2-D weight multiplies activations, by the names of their classes and base classes,
# since Transformer Engine's cannot be imported everywhere.
MATRIX_MODULES = frozenset(
    {
        "Linear",  # torch's, Megatron's and Transformer Engine's, so also TELinear and others
        "ColumnParallelLinear",
        "RowParallelLinear",
        "LayerNormLinear",
        "TEColumnParallelLinear",
        "TERowParallelLinear",
        "TELayerNormColumnParallelLinear",
        "TELinear",
        "GroupedLinear",
        "TEGroupedLinear",
        "TEColumnParallelGroupedLinear",
        "TERowParallelGroupedLinear",
        "GroupedMLP",
        "Router",
    }
)
_ADAPTER = re.compile(r"lora|adapter", re.IGNORECASE)
_EMBEDDING_OR_OUTPUT = re.compile(r"embed|output_layer|lm_head|binary_head", re.IGNORECASE)
# What the copies of a tied embedding are called, on the first and on the last pipeline stage.
_TIED = ("embedding.word_embeddings.weight", "output_layer.weight")
_LAYER = re.compile(r"(.*\blayers\.)\d+$")
_LOCAL_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)(.*)$")


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of a model chunk.

    Attributes:
        name: Megatron's, without the names of wrapping modules, and with layers numbered over all
            pipeline stages. Experts are numbered as on EP rank 0: see ``expert_name``.
        param: the local TP slice.
        module: that holds it.
        model_config: the TransformerConfig that this part of the model was built from.
        is_expert: one of an MoE layer's routed experts has it.
    """

    name: str
    param: torch.nn.Parameter
    module: torch.nn.Module
    model_config: Any
    is_expert: bool

    @property
    def leaf(self) -> str:
        """Name of the module that holds it: ``linear_fc1``."""
        return self.name.rsplit(".", 2)[-2] if self.name.count(".") else ""

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, and of a tied embedding those of its copies, which must share its fate."""
        return (
            (self.name, *_TIED) if getattr(self.param, "shared_embedding", False) else (self.name,)
        )

    @property
    def is_tied_copy(self) -> bool:
        """A last pipeline stage's copy of an embedding that the first stage has."""
        return bool(getattr(self.param, "shared", False))

    def is_module(self, *class_names: str) -> bool:
        """True if the module is of one of these classes or a subclass."""
        return not _class_names(self.module).isdisjoint(class_names)


def weights(model_chunks: Sequence[torch.nn.Module]) -> Iterator[Weight]:
    """Every parameter of all chunks once, in Megatron's order."""
    seen = set()
    for chunk in model_chunks:
        chunk_config = get_model_config(chunk)
        layers: dict[str, str] = {}
        for path, module in chunk.named_modules():
            layer = _LAYER.match(path)
            if layer and isinstance(getattr(module, "layer_number", None), int):
                layers[f"{path}."] = f"{layer[1]}{module.layer_number - 1}."
            for short_name, param in module.named_parameters(recurse=False):
                if param in seen:
                    continue
                seen.add(param)
                name = _model_wide(f"{path}.{short_name}" if path else short_name, layers)
                config = getattr(module, "config", None)
                yield Weight(
                    name=name,
                    param=param,
                    module=module,
                    model_config=config if hasattr(config, "gated_linear_unit") else chunk_config,
                    is_expert=".experts." in name,
                )


def expert_name(name: str, ep_rank: int, local_experts: int) -> str:
    """``name``, which counts a rank's own experts, with the expert's number over all EP ranks."""
    found = _LOCAL_EXPERT.match(name)
    if found is None:
        return name
    return f"{found[1]}{int(found[2]) + ep_rank * local_experts}{found[3]}"


def why_adamw(weight: Weight, config: MuonConfig) -> str | None:
    """Why AdamW updates the weight; None where Muon does.

    Raises:
        ValueError: a pattern asks for what cannot be.
        NotImplementedError: an adapter's weight that no pattern decides about.
    """
    included = matching(weight, config.muon_include)
    excluded = matching(weight, config.muon_exclude)
    if included and excluded:
        raise ValueError(
            f"{weight.name} matches muon_include {included[0]!r} and muon_exclude {excluded[0]!r}: "
            "change one of the patterns"
        )
    if included:
        if weight.param.dim() != 2:
            raise ValueError(
                f"muon_include {included[0]!r} matches {weight.name} of shape "
                f"{tuple(weight.param.shape)}, but Muon updates matrices: only 2-D weights"
            )
        return None
    if excluded:
        return f"muon_exclude {excluded[0]!r}"
    return _why_adamw_by_itself(weight)


def is_unknown(weight: Weight, config: MuonConfig) -> bool:
    """A 2-D weight that is AdamW's only because its module type is not in the table."""
    return _by_type(weight) == why_adamw(weight, config) is not None


def matching(weight: Weight, patterns: Sequence[str]) -> list[str]:
    """The patterns that match a parameter's name, case and all, or that of a tied copy."""
    return [
        pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in weight.names)
    ]


def _why_adamw_by_itself(weight: Weight) -> str | None:
    param = weight.param
    if param.dim() != 2:
        return f"{param.dim()}-D"
    if _is_embedding_or_output(weight):
        return "embedding or output layer"
    if min(param.shape) == 1:
        return "a vector"
    if getattr(param, "use_muon", True) is False:  # Megatron's own mark on fused projections
        return "marked use_muon=False"
    if _ADAPTER.search(weight.name):
        raise NotImplementedError(
            f"{weight.name} looks like the weight of an adapter, whose two factors Muon would "
            "orthogonalize each for itself: decide by naming it in muon_include or muon_exclude of "
            "MuonConfig"
        )
    return _by_type(weight)


def _by_type(weight: Weight) -> str | None:
    if weight.is_module(*MATRIX_MODULES):
        return None
    return f"module type {type(weight.module).__name__} is not in Muon's table"


def _is_embedding_or_output(weight: Weight) -> bool:
    """By mark, by module and by name: each tells what the others do not, e.g. MTP's copy."""
    return (
        getattr(weight.param, "is_embedding_or_output_parameter", False)
        or getattr(weight.param, "shared_embedding", False)
        or isinstance(weight.module, (torch.nn.Embedding, VocabParallelEmbedding))
        or _EMBEDDING_OR_OUTPUT.search(weight.name) is not None
    )


def _class_names(module: torch.nn.Module) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__}


def _model_wide(name: str, layers: dict[str, str]) -> str:
    """With layers numbered over all stages, and without the names of wrapping modules."""
    for local in sorted(layers, key=len):  # outer layers first
        if name.startswith(local):
            name = layers[local] + name.removeprefix(local)
            break
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
