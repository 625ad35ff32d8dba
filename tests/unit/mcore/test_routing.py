"""Which parameters are Muon's, by mark, module, name and pattern, and which matrices
they hold.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_muon.mcore.host.process_groups import Sizes
from megatron_muon.mcore.routing.param_routing import (
    EMBEDDING_OR_OUTPUT,
    MARKED,
    Weight,
    weights,
    why_adamw,
)
from megatron_muon.mcore.routing.routes import Route, routes_of
from megatron_muon.mcore.routing.survey import remarks_on
from megatron_muon.mcore.wiring.buffers.placement import muon_parameters
from megatron_muon.planning.describe import Share, share_lines
from megatron_muon.planning.layout import Parameter
from megatron_muon.settings.config import MuonConfig

QKV = "module.module.decoder.layers.0.self_attention.linear_qkv.weight"
SIZES = {"num_query_groups": 2, "num_attention_heads": 6, "kv_channels": 4}


def _weight(*shape: int, **marks: Any) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.zeros(shape))
    for name, value in marks.items():
        setattr(weight, name, value)
    return weight


def _module(class_name: str, **attributes: Any) -> torch.nn.Module:
    """A module of a class that may not be importable here; only its name counts."""
    module: torch.nn.Module = type(class_name, (torch.nn.Module,), {})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class _Chunk(torch.nn.Module):
    """Parameters by names of Megatron's, in modules of a type, with the model's
    sizes.
    """

    def __init__(
        self,
        weights_by_name: dict[str, torch.nn.Parameter],
        class_name: str = "ColumnParallelLinear",
        attributes: dict[str, Any] | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__()
        for name, weight in weights_by_name.items():
            module: torch.nn.Module = self
            *folders, leaf, last = name.split(".")
            for folder in folders:
                if not hasattr(module, folder):
                    module.add_module(folder, torch.nn.Module())
                module = getattr(module, folder)
            if not hasattr(module, leaf):
                module.add_module(leaf, _module(class_name, **(attributes or {})))
            getattr(module, leaf).register_parameter(last, weight)
        self.config = SimpleNamespace(**{"gated_linear_unit": False, **sizes})


def _routed(
    chunk: torch.nn.Module, tp_size: int = 1, **settings: Any
) -> list[Parameter]:
    """All of a chunk's parameters in one bucket, as muon_parameters sees them."""
    places, position = {}, 0
    for param in chunk.parameters():
        places[param] = (position, position + param.numel(), 0)
        position += param.numel()
    bucket = SimpleNamespace(offset=0, grad_data=torch.zeros(position))
    buffer = SimpleNamespace(param_index_map=places, buckets=[bucket])
    expert_tp_size = settings.pop("expert_tp_size", tp_size)
    config = MuonConfig(**settings)
    routes = routes_of([chunk], Sizes(tp_size, expert_tp_size), config)
    return [p for _, p in muon_parameters(routes, [buffer])]


def _one(
    name: str, weight: torch.nn.Parameter, class_name: str = "ColumnParallelLinear"
) -> Weight:
    (only,) = weights([_Chunk({name: weight}, class_name)])
    return only


def _why(weight: Weight, **settings: Any) -> str | None:
    return why_adamw(weight, MuonConfig(**settings))


def _is_unknown(weight: Weight, **settings: Any) -> bool:
    return Route(weight, 0, None, _why(weight, **settings)).is_unknown


def _over_tp_2(weight: Weight) -> Weight:
    """The same slice as one of two."""
    return replace(weight, tp_size=2)


FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
EMBEDDINGS = (
    # Megatron does not mark a pipeline stage's copy of a tied embedding: the name
    # decides
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "output_layer.weight",
    # heads and patch embeddings of other models that Megatron does not mark
    "model.lm_head.weight",
    "model.binary_head.weight",
    "vision_model.embedder.weight",
)


def test_two_dims_that_are_no_embedding_and_no_output_are_muons() -> None:
    def why(name: str, *shape: int, **marks: bool) -> str | None:
        return _why(_one(name, _weight(*shape, **marks)))

    assert why(FC1, 4, 4) is None
    assert {why(name, 4, 4) for name in EMBEDDINGS} == {EMBEDDING_OR_OUTPUT}
    for mark in ("is_embedding_or_output_parameter", "shared_embedding"):
        assert why("decoder.head.weight", 4, 4, **{mark: True}) == EMBEDDING_OR_OUTPUT
    assert why("mixer.in_proj.weight", 4, 4, use_muon=False) == MARKED
    assert why("mlp.shared_experts.gate_weight", 1, 4) == "a vector"
    assert (why(FC1, 4), why(FC1, 0, 4)) == ("1-D", "no elements")
    assert str(why("decoder.layers.0.conv.weight", 4, 4, 4)).startswith("3-D of ")


@pytest.mark.parametrize(
    "shape, partition_dim, at_tp_2",
    [
        ((1, 4), 0, True),  # (2, 4) at TP 1
        ((4, 1), 1, True),
        ((1, 4), 1, False),  # (1, 8) at TP 1
        ((1, 4), -1, False),  # replicas
    ],
)
def test_the_whole_matrix_says_whether_it_is_a_vector(
    shape: tuple[int, int], partition_dim: int, at_tp_2: bool
) -> None:
    marks = {
        "tensor_model_parallel": partition_dim >= 0,
        "partition_dim": partition_dim,
    }
    weight = _one("decoder.layers.0.mlp.linear.weight", _weight(*shape, **marks))
    assert _why(weight) == "a vector"
    assert (_why(_over_tp_2(weight)) is None) == at_tp_2


def test_an_experts_matrix_is_whole_over_expert_tp_ranks() -> None:
    fc2 = _one(f"{EXPERTS}local_experts.0.linear_fc2.weight", _weight(4, 1))
    assert _why(_over_tp_2(fc2)) is None
    other = _one(f"{EXPERTS}local_experts.0.gate.weight", _weight(1, 4), "Whatever")
    assert not _is_unknown(other)  # a vector
    # how TP splits it is not known: it is named
    assert _is_unknown(_over_tp_2(other))


@pytest.mark.parametrize("local", [1, 4])
def test_legacy_experts_are_vectors_by_one_experts_matrix(local: int) -> None:
    """However many experts a rank has beside one another."""
    sizes = {**MOE, "num_moe_experts": 4, "expert_model_parallel_size": 4 // local}
    shapes = {"weight1": (5, local), "weight2": (local, 5)}
    for name, shape in shapes.items():
        chunk = _Chunk(
            {f"{EXPERTS[:-1]}.{name}": _weight(*shape)}, "GroupedMLP", **sizes
        )
        (weight,) = weights([chunk])
        assert _why(weight) == "a vector"
        assert _why(_over_tp_2(weight)) is None


def test_an_embedding_module_is_adamws_whatever_its_name() -> None:
    chunk = torch.nn.Sequential(
        torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4, bias=False)
    )
    chunk.config = SimpleNamespace(gated_linear_unit=False, **SIZES)
    assert [parameter.name for parameter in _routed(chunk)] == ["1.weight"]


@pytest.mark.parametrize(
    "class_name",
    "TELinear TopKRouter RowParallelLinear TELayerNormColumnParallelLinear".split(),
)
def test_a_subclass_of_a_known_module_is_known(class_name: str) -> None:
    """Transformer Engine's classes go by name, since they cannot be imported
    everywhere.
    """
    base = "Router" if class_name == "TopKRouter" else class_name
    subclass = type("Mine", (type(_module(base)),), {})()
    subclass.register_parameter("weight", _weight(4, 4))
    chunk = torch.nn.Module()
    chunk.add_module("here", subclass)
    chunk.config = SimpleNamespace(gated_linear_unit=False)
    (only,) = weights([chunk])
    assert _why(only) is None


def test_a_matrix_of_an_unknown_module_is_adamws_and_reported() -> None:
    unknown = _one("decoder.layers.0.mixer.weight", _weight(4, 4), "Whatever")
    why = _why(unknown)
    assert why is not None and "Whatever is not in Muon's table" in why
    assert _is_unknown(unknown)
    assert not _is_unknown(unknown, muon_include=("*.mixer.*",))
    assert not _is_unknown(unknown, muon_exclude=("*.mixer.*",))
    assert not _is_unknown(_one("a.b.bias", _weight(4), "Whatever"))
    assert not _is_unknown(_one("embedding.w", _weight(4, 4), "Whatever"))


def test_matrices_of_a_forks_classes_are_named_whatever_their_share() -> None:
    """Two-dimensional or a batch of experts; a subclass of a known class is Muon's."""
    fork = {
        f"{EXPERTS}weight": _weight(4, 8, 8),
        "decoder.layers.7.mlp.fork.weight": _weight(4, 4),
    }
    others = {
        "decoder.layers.0.mixer.conv1d_weight": _weight(8, 1, 4),
        "class_token": _weight(2),
    }
    chunk = _Chunk(
        {**fork, **{f"decoder.{name}": weight for name, weight in others.items()}}, "Of"
    )
    marked = _Chunk(
        {f"decoder.layers.{n}.mixer.weight": _weight(4, 4) for n in range(2)}
    )
    for param in marked.parameters():
        param.use_muon = False  # type: ignore[attr-defined]
    conv = torch.nn.Conv1d(4, 4, 4)
    conv.config = SimpleNamespace(gated_linear_unit=False)
    routes = routes_of([chunk, marked, conv], Sizes(2), MuonConfig())
    of_routes = (remarks_on(route, MuonConfig()) for route in routes)
    remarks = list(chain.from_iterable(of_routes))
    of_model = Share(2, 1, 2, 1, remarks=remarks)
    _, *kept = share_lines(of_model + of_model)
    assert kept == [
        "AdamW keeps decoder.layers.*.mlp.experts.weight (3-D of Of, which is not in "
        "Muon's table)",
        "AdamW keeps decoder.layers.*.mlp.fork.weight (module type Of is not in Muon's "
        "table)",
        "AdamW keeps decoder.layers.*.mixer.weight (marked use_muon=False)",
    ]


def test_patterns_overrule_the_table() -> None:
    for name, kind, settings, is_muons in (
        (
            "decoder.layers.0.mixer.weight",
            "Whatever",
            {"muon_include": ("*mixer*",)},
            True,
        ),
        (FC1, "Linear", {"muon_exclude": ("*.linear_fc?.*",)}, False),
        ("output_layer.weight", "Linear", {"muon_include": ("output_layer.*",)}, True),
    ):
        chunk = _Chunk({name: _weight(4, 4)}, kind)
        assert [p.name for p in _routed(chunk)] == [name] * (not is_muons)
        assert [p.name for p in _routed(chunk, **settings)] == [name] * is_muons


def test_impossible_patterns_are_errors() -> None:
    fc2 = _one("mlp.linear_fc2.weight", _weight(4, 4))
    with pytest.raises(
        ValueError, match=r"-include\) '\*fc2\*' and .*-muon-exclude\) 'mlp"
    ):
        _why(fc2, muon_include=("*fc2*",), muon_exclude=("mlp.*",))
    empty = _one(FC1, _weight(0, 4))
    with pytest.raises(ValueError, match=r"shape \(0, 4\), but Muon updates matrices"):
        _why(empty, muon_include=("*fc1*",))
    bias = _one("mlp.linear_fc2.bias", _weight(4))
    with pytest.raises(
        ValueError, match=r"mlp.linear_fc2.bias of shape \(4,\), but Muon updates"
    ):
        _why(bias, muon_include=("mlp.*",))


def test_an_adapter_is_an_error_until_a_pattern_decides() -> None:
    lora = _one(
        "decoder.layers.0.mlp.linear_fc1.lora_a.weight", _weight(4, 16), "Linear"
    )
    with pytest.raises(
        NotImplementedError, match=r"Choose with muon_include .* muon_ex"
    ):
        _why(lora)
    assert _why(lora, muon_include=("*.lora_?.*",)) is None
    assert _why(lora, muon_exclude=("*.lora_?.*",)) is not None
    norm = _one("decoder.lora_norm.weight", _weight(4), "Linear")
    assert _why(norm) == "1-D"


@pytest.mark.parametrize("local_rows, tp_size", [(28, 2), (11, 4)])
def test_a_qkv_of_another_shape_is_refused(local_rows: int, tp_size: int) -> None:
    weight = _weight(local_rows, 24, tensor_model_parallel=True, partition_dim=0)
    with pytest.raises(
        NotImplementedError, match=r"set split_qkv=False .*-no-split-qkv"
    ):
        _routed(_Chunk({QKV: weight}, **SIZES), tp_size)


@pytest.mark.parametrize(
    "parallel_mode, te_tp_size, replicated",
    [
        (None, 1, True),
        ("duplicated", 1, True),
        ("column", 2, False),
        # Megatron's shared experts that overlap are split all the same
        (None, 2, False),
    ],
)
def test_a_replicated_linear_is_known_by_its_module_not_by_its_marks(
    parallel_mode: str | None, te_tp_size: int, replicated: bool
) -> None:
    """Transformer Engine marks MLA's down-projections as partitioned."""
    name = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    weight = _weight(6, 5, tensor_model_parallel=True, partition_dim=0)
    attributes = {"parallel_mode": parallel_mode, "tp_size": te_tp_size}
    (routed,) = _routed(_Chunk({name: weight}, "TELinear", attributes, **SIZES), 2)
    assert routed.replicated == replicated


@pytest.mark.parametrize("name", [QKV, "decoder.layers.0.mlp.linear_fc1.weight"])
def test_a_fused_weight_that_tp_does_not_split_by_rows_is_refused(name: str) -> None:
    chunk = _Chunk({name: _weight(40, 24)}, **SIZES)
    chunk.config.gated_linear_unit = True
    with pytest.raises(
        NotImplementedError, match="partition_dim is None: put it in muon_exclude"
    ):
        _routed(chunk, 2)
    assert len(_routed(chunk, 1)) == 1


def test_how_expert_tp_splits_a_weight_is_unknown_but_of_megatrons_own_linears() -> (
    None
):
    name = "decoder.layers.0.mlp.experts.local_experts.0.linear_in.weight"
    marked = {"tensor_model_parallel": True, "partition_dim": 0}
    (alone,) = _routed(_Chunk({name: _weight(4, 5, **marked)}, "TELinear", **MOE))
    assert (alone.matrices[0].rows, alone.partition_dim) == (4, None)
    (own,) = _routed(_Chunk({name: _weight(4, 5, **marked)}, **MOE), expert_tp_size=2)
    assert (own.matrices[0].rows, own.partition_dim) == (8, 0)
    with pytest.raises(
        NotImplementedError, match=r"linear_in\.weight: how expert TP splits it is"
    ):
        _routed(
            _Chunk({name: _weight(4, 5, **marked)}, "TELinear", **MOE), expert_tp_size=2
        )


def test_copies_of_a_tied_embedding_share_a_pattern() -> None:
    """Else one stage would give it to Muon and another to AdamW."""
    first, last = (
        _one(name, _weight(4, 4, shared_embedding=True))
        for name in ("embedding.word_embeddings.weight", "output_layer.weight")
    )
    for pattern in ("embedding.*", "output_layer.weight"):
        for one in (first, last):
            assert _why(one, muon_include=(pattern,)) is None
    alone = _one("output_layer.weight", _weight(4, 4))
    assert _why(alone, muon_include=("embedding.*",)) is not None


MOE = {"num_moe_experts": 4, "expert_model_parallel_size": 2, "hidden_size": 5, **SIZES}
EXPERTS = "decoder.layers.0.mlp.experts."
