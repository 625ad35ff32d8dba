"""Decides which parameters Muon updates and which AdamW updates.

2-D weights of the module types in ``MATRIX_MODULES`` are Muon's unless they are an
embedding or the output layer; all else is AdamW's. Embeddings and the output layer are
known by Megatron's mark ``is_embedding_or_output_parameter``, by the class of their
module or by name. The patterns ``muon_include`` and ``muon_exclude`` overrule all of
that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.utils import get_model_config
from torch.nn import Module, Parameter

from megatron_muon.mcore.host.process_groups import Chunks, Sizes
from megatron_muon.settings.config import MuonConfig, named
from megatron_muon.settings.patterns import fits

# Modules whose 2-D weight multiplies activations, by the names of their classes and
# base classes, since Transformer Engine's cannot be imported everywhere. "Linear" is
# torch's, Megatron's and Transformer Engine's, so also TELinear and others.
MATRIX_MODULES = (
    "Linear",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "LayerNormLinear",
    "TELinear",
    "TEColumnParallelLinear",
    "TERowParallelLinear",
    "TELayerNormColumnParallelLinear",
    "GroupedLinear",
    "TEGroupedLinear",
    "TEColumnParallelGroupedLinear",
    "TERowParallelGroupedLinear",
    "GroupedMLP",
    "Router",
)
# a key of a group whose rate is multiplied; others have none
LR_MULTIPLIER = "muon_lr_mult"
# a key of a group that has rates or decays by pattern: these, as a text
GROUP_SETTINGS = "muon_settings"
EMBEDDING_OR_OUTPUT = "embedding or output layer"  # reasons of ``why_adamw``
NOT_IN_TABLE = "not in Muon's table"
MARKED = "marked use_muon=False"  # Megatron's own mark on fused projections
ADAPTERS = "*.adapter.*.weight"
_ADAPTER = re.compile(r"lora|adapter", re.IGNORECASE)
_EMBEDDING_OR_OUTPUT = re.compile(
    r"embed|output_layer|lm_head|binary_head", re.IGNORECASE
)
# Names of a tied embedding's copies, on the first and on the last pipeline stage.
_TIED = ("embedding.word_embeddings.weight", "output_layer.weight")
# TP splits the outputs of an expert's first layer and the inputs of its second one.
_EXPERT_PARTITION_DIM = {"linear_fc1": 0, "linear_fc2": 1}
# Vectors that TP cuts by heads without a mark: softmax offsets, and before core 0.16
# the norm in a Mamba mixer.
_CUT_VECTOR = re.compile(r"\.(softmax_offset|mixer\.norm\.weight)$")
_NO_TP = Sizes(1)
_NUMBER = re.compile(r"(\.|weight|bias)\d+(?=\.|$)")
_WRAPPERS = re.compile(r"^(module\.)+")
_LAYER = re.compile(r".*\blayers\.\d+$")
_LAST = re.compile(r"(?!.*\blayers\.)(.*\.)?(final_layernorm|final_norm|output_layer)$")
_LOCAL_EXPERT = re.compile(
    r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)(.*)$"
)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of a model chunk."""

    # Megatron's, without wrapping modules; layers are numbered over all pipeline
    # stages, experts as on EP rank 0 (``expert_name``)
    name: str
    param: Parameter  # the local TP slice
    module: Module  # the one that holds it
    holders: tuple[Module, ...]  # from the innermost module to the model chunk
    # the TransformerConfig that this part of the model was built from
    model_config: Any
    is_expert: bool  # one of an MoE layer's routed experts has it
    tp_size: int = 1  # number of TP ranks that share it

    @property
    def holder(self) -> Any:
        """The module around the one that holds it; None around a model chunk."""
        return self.holders[0] if self.holders else None

    @property
    def leaf(self) -> str:
        """Name of the module that holds it: ``linear_fc1``."""
        return self.name.rsplit(".", 2)[-2] if self.name.count(".") else ""

    @property
    def names(self) -> tuple[str, ...]:
        """Its name; for a tied embedding also the names of its copies, which must have
        the same optimizer.
        """
        tied = _TIED if getattr(self.param, "shared_embedding", False) else ()
        return (self.name, *tied)

    @property
    def is_tied_copy(self) -> bool:
        """A last pipeline stage's copy of an embedding that the first stage has."""
        return bool(getattr(self.param, "shared", False))

    def is_module(self, *class_names: str) -> bool:
        """True if the module is of one of these classes or a subclass."""
        return is_of_class(self.module, *class_names)


def weights(model_chunks: Chunks, sizes: Sizes = _NO_TP) -> Iterator[Weight]:
    """Every parameter of all chunks once, in Megatron's order.

    Who asks only for names, marks or classes may omit the ``sizes`` of TP.
    """
    seen = set()
    for prefix, module, holders in modules(model_chunks):
        config = getattr(module, "config", None)
        if not hasattr(config, "gated_linear_unit"):
            config = get_model_config(holders[-1] if holders else module)
        for short_name, param in module.named_parameters(recurse=False):
            if param in seen:
                continue
            seen.add(param)
            name = prefix + short_name
            is_expert = ".experts." in name
            yield Weight(
                name=name,
                param=param,
                module=module,
                holders=holders,
                model_config=config,
                is_expert=is_expert,
                tp_size=sizes.expert_tp if is_expert else sizes.tp,
            )


def layers(
    model_chunks: Chunks,
) -> Iterator[tuple[str, Module]]:
    """Name and module of each layer; on the last stage also the final norm and the
    output layer.
    """
    for prefix, module, _ in modules(model_chunks):
        name = prefix.removesuffix(".")
        if _is_layer(name, module) or _LAST.match(name):
            yield name, module


def modules(
    model_chunks: Chunks,
) -> Iterator[tuple[str, Module, tuple[Module, ...]]]:
    """Each module of all chunks: what the names of its parameters begin with, itself,
    and the modules that it is in, from the innermost to the chunk.

    Names count layers over all pipeline stages, and skip wrapping modules.
    """
    for chunk in model_chunks:
        # by path; what is around a module comes before it
        holders: dict[str, tuple[Module, ...]] = {}
        # prefixes over all stages by those in the chunk, of layers
        numbered: dict[str, str] = {}
        for path, module in chunk.named_modules():
            around = path.rpartition(".")[0]
            outer = holders[around] if path else ()
            holders[path] = (module, *outer)
            prefix = f"{path}." if path else ""
            if _is_layer(path, module):
                numbered[prefix] = f"{around}.{module.layer_number - 1}."
            # a layer around others comes before them; they are numbered within it
            layer = next(filter(prefix.startswith, numbered), "")
            name = numbered.get(layer, "") + prefix.removeprefix(layer)
            yield _WRAPPERS.sub("", name), module, outer


def _is_layer(name: str, module: Module) -> bool:
    number = getattr(module, "layer_number", None)
    return _LAYER.match(name) is not None and isinstance(number, int)


def expert_name(name: str, ep_rank: int, local_experts: int) -> str:
    """``name``, which counts the experts of one rank, with the expert's number over all
    EP ranks.
    """
    match = _LOCAL_EXPERT.match(name)
    if match is None:
        return name
    return f"{match[1]}{int(match[2]) + ep_rank * local_experts}{match[3]}"


def names_of(weight: Weight, ep_rank: int, local_experts: int) -> list[str]:
    """``weight.names``, with experts numbered over all EP ranks."""
    return [expert_name(name, ep_rank, local_experts) for name in weight.names]


def of_any_number(name: str) -> str:
    """``name`` with * for the numbers of layers and experts."""
    return _NUMBER.sub(r"\1*", name)


def why_adamw(weight: Weight, config: MuonConfig) -> str | None:
    """Why AdamW updates the weight; None where Muon does. The same at every TP and EP
    size.

    Raises:
        ValueError: a pattern asks for what cannot be.
        NotImplementedError: an adapter's weight that no pattern decides about.
    """
    included = matching(weight, config.muon_include)
    excluded = matching(weight, config.muon_exclude)
    if included and excluded:
        raise ValueError(
            f"{weight.name} matches {named('muon_include')} {included[0]!r} and "
            f"{named('muon_exclude')} {excluded[0]!r}: change one of the patterns"
        )
    if included:
        if weight.param.dim() != 2 or not weight.param.numel():
            raise ValueError(
                f"{named('muon_include')} {included[0]!r} matches {weight.name} of "
                f"shape {tuple(weight.param.shape)}, but Muon updates matrices: only "
                "2-D weights that have elements"
            )
        return None
    if excluded:
        return f"{named('muon_exclude')} {excluded[0]!r}"
    return _why_adamw_by_itself(weight) if weight.param.numel() else "no elements"


def is_muons(weight: Weight, config: MuonConfig) -> bool:
    """Whether Muon updates the weight; see ``why_adamw``."""
    return weight.param.dim() == 2 and why_adamw(weight, config) is None


def matching(weight: Weight, patterns: Sequence[str]) -> list[str]:
    """The patterns that match a parameter's name, case and all, or that of a tied
    copy.
    """
    return [pattern for pattern in patterns if fits(pattern, weight.names)]


def last_of(
    weight: Weight, pairs: Sequence[tuple[str, Any]], default: Any
) -> tuple[str, Any]:
    """The last pattern that matches, and its value; "" and ``default`` where none
    does.
    """
    fitting = [pair for pair in pairs if fits(pair[0], weight.names)]
    return fitting[-1] if fitting else ("", default)


def is_adapter(weight: Weight) -> bool:
    """By its name it is one of the two factors of an adapter."""
    return _ADAPTER.search(weight.name) is not None


def _why_adamw_by_itself(weight: Weight) -> str | None:
    param = weight.param
    if param.dim() != 2 and not _is_batch(weight):
        return f"{param.dim()}-D"
    if _is_embedding_or_output(weight):
        return EMBEDDING_OR_OUTPUT
    if param.dim() != 2:
        return (
            f"{param.dim()}-D of {type(weight.module).__name__}, which is "
            f"{NOT_IN_TABLE}"
        )
    if _is_vector(weight):
        return "a vector"
    if getattr(param, "use_muon", True) is False:
        return MARKED
    if is_adapter(weight):
        raise NotImplementedError(
            f"{weight.name} looks like an adapter's weight; Muon would orthogonalize "
            f"its two factors separately. Choose with {named('muon_include')} or "
            f"{named('muon_exclude')}: {ADAPTERS!r} names all of Megatron-Bridge's"
        )
    if weight.is_module(*MATRIX_MODULES):
        return None
    return f"module type {type(weight.module).__name__} is {NOT_IN_TABLE}"


def _is_batch(weight: Weight) -> bool:
    """A batch of matrices by its shape: experts of a fork, and no convolution or
    position.
    """
    is_batch = weight.param.dim() == 3 and min(weight.param.shape) > 1
    return is_batch and not weight.is_module("_ConvNd") and not is_adapter(weight)


def _is_vector(weight: Weight) -> bool:
    """By the whole matrix, not by what of it a TP rank holds."""
    try:
        return min(whole_shape(weight)) == 1
    # an expert's weight; if it is Muon's, ``matrices_of`` says so
    except NotImplementedError:
        return False


def local_shape(weight: Weight) -> tuple[int, int]:
    """Rows and columns of a TP rank's 2-D weight; of legacy grouped experts, one
    expert's.
    """
    if not weight.is_module("GroupedMLP"):
        rows, cols = weight.param.shape
        return rows, cols
    model = weight.model_config
    experts = model.num_moe_experts // model.expert_model_parallel_size
    hidden = model.hidden_size
    inner = weight.param.numel() // (experts * hidden)
    return (hidden, inner) if partition_dim_of(weight) == 1 else (inner, hidden)


def whole_shape(weight: Weight) -> tuple[int, int]:
    """``local_shape`` over all TP ranks.

    A NotImplementedError for an expert's, by a name that is not known.
    """
    rows, cols = local_shape(weight)
    tp_size = weight.tp_size
    dim = partition_dim_of(weight) if tp_size > 1 else None
    return rows * (tp_size if dim == 0 else 1), cols * (tp_size if dim == 1 else 1)


def partition_dim_of(weight: Weight) -> int | None:
    """The dim that TP splits, None where TP ranks hold replicas.

    Transformer Engine marks every Linear as partitioned. It does so with replicated
    ones (``parallel_mode`` None with a ``tp_size`` of 1: MLA's down-projections), and
    with experts' second layers on the wrong dim. Megatron sets ``parallel_mode`` None
    on shared experts that overlap, too, which are split. Megatron's own linears, of
    which adapters are made, mark the dim.

    Raises:
        NotImplementedError: a 2-D weight of an expert that expert TP splits in an
            unknown way.
    """
    if weight.is_module("GroupedMLP"):
        return 1 if weight.name.endswith("weight1") else 0
    if weight.is_expert and weight.param.dim() == 2:
        if weight.leaf in _EXPERT_PARTITION_DIM:
            return _EXPERT_PARTITION_DIM[weight.leaf]
        if weight.tp_size == 1:
            return None
        if not weight.is_module("ColumnParallelLinear", "RowParallelLinear"):
            raise NotImplementedError(
                f"{weight.name}: how expert TP splits it is known of linear_fc1, "
                "linear_fc2 and Megatron's own linears only: put it in "
                f"{named('muon_exclude')} of MuonConfig, or set "
                "expert_tensor_parallel_size=1"
            )
    replicated = getattr(weight.module, "parallel_mode", "marked") in (
        None,
        "duplicated",
    )
    if replicated and getattr(weight.module, "tp_size", 1) == 1:
        return None
    if not getattr(weight.param, "tensor_model_parallel", False):
        return None
    partition_dim = int(getattr(weight.param, "partition_dim", -1))
    # Megatron says -1 where we say None
    return partition_dim if partition_dim >= 0 else None


def is_cut(weight: Weight) -> bool:
    """Whether TP ranks hold parts of it: by Megatron's mark, or where that is known to
    be wrong or to lack. Marks of experts' 2-D weights can be wrong.
    """
    if weight.param.dim() == 2 and not weight.is_expert:
        return partition_dim_of(weight) is not None
    marked = bool(getattr(weight.param, "tensor_model_parallel", False))
    return marked or _CUT_VECTOR.search(weight.name) is not None


def _is_embedding_or_output(weight: Weight) -> bool:
    """By mark, by module and by name: each tells what the others do not, e.g. MTP's
    copy.
    """
    return (
        getattr(weight.param, "is_embedding_or_output_parameter", False)
        or getattr(weight.param, "shared_embedding", False)
        or isinstance(weight.module, (torch.nn.Embedding, VocabParallelEmbedding))
        or _EMBEDDING_OR_OUTPUT.search(weight.name) is not None
    )


def is_of_class(module: Module, *names: str) -> bool:
    """Whether a module is of one of these classes or a subclass, by name."""
    return not {cls.__name__ for cls in type(module).__mro__}.isdisjoint(names)
