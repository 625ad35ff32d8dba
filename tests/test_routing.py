"""Which parameters are Muon's, by Megatron's mark and by name, and how fused weights are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_muon.config import MuonConfig
from megatron_muon.mcore.routing import is_muons, muon_parameters, named_parameters


def _weight(*shape: int, **marks: Any) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.zeros(shape))
    for name, value in marks.items():
        setattr(weight, name, value)
    return weight


def test_two_dims_that_are_no_embedding_and_no_output_are_muons() -> None:
    marked = _weight(4, 4, is_embedding_or_output_parameter=True)
    assert is_muons("decoder.layers.0.mlp.linear_fc1.weight", _weight(4, 4))
    assert not is_muons("decoder.layers.0.mlp.linear_fc1.bias", _weight(4))
    assert not is_muons("decoder.layers.0.conv.weight", _weight(4, 4, 4))
    assert not is_muons("decoder.head.weight", marked)
    # Megatron does not mark a pipeline stage's copy of a tied embedding: the name decides.
    assert not is_muons("embedding.word_embeddings.weight", _weight(4, 4))
    assert not is_muons("embedding.position_embeddings.weight", _weight(4, 4))
    assert not is_muons("output_layer.weight", _weight(4, 4))


class _Chunk(torch.nn.Module):
    """One parameter by a name of Megatron's, with the model's sizes."""

    def __init__(self, name: str, weight: torch.nn.Parameter, **sizes: Any) -> None:
        super().__init__()
        module: torch.nn.Module = self
        *folders, last = name.split(".")
        for folder in folders:
            module.add_module(folder, torch.nn.Module())
            module = getattr(module, folder)
        module.register_parameter(last, weight)
        self.config = SimpleNamespace(gated_linear_unit=False, **sizes)


def _found(chunk: _Chunk, tp_size: int, **settings: Any) -> Any:
    ((_, weight),) = chunk.named_parameters()
    bucket = SimpleNamespace(offset=0, grad_data=torch.zeros(weight.numel()))
    places = {weight: (0, weight.numel(), 0)}
    buffer = SimpleNamespace(param_index_map=places, buckets=[bucket])
    ((_, found),) = muon_parameters([chunk], [buffer], tp_size, MuonConfig(**settings))
    return found


QKV = "module.module.decoder.layers.0.self_attention.linear_qkv.weight"
SIZES = {"num_query_groups": 2, "num_attention_heads": 6, "kv_channels": 4}


def test_a_fused_qkv_is_three_matrices_or_one() -> None:
    rows = 2 * (3 + 2) * 4
    weight = _weight(rows // 2, 24, tensor_model_parallel=True, partition_dim=0)
    found = _found(_Chunk(QKV, weight, **SIZES), 2)
    assert found.name == QKV.removeprefix("module.module.")
    assert [(m.rows, m.cols) for m in found.matrices] == [(24, 24), (8, 24), (8, 24)]
    (whole,) = _found(_Chunk(QKV, weight, **SIZES), 2, split_qkv=False).matrices
    assert (whole.rows, whole.cols) == (rows, 24)


def test_an_embedding_module_is_adamws_whatever_its_name() -> None:
    chunk = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4, bias=False))
    chunk.config = SimpleNamespace(gated_linear_unit=False, **SIZES)
    bucket = SimpleNamespace(offset=0, grad_data=torch.zeros(48))
    places = {chunk[0].weight: (0, 32, 0), chunk[1].weight: (32, 48, 0)}
    buffer = SimpleNamespace(param_index_map=places, buckets=[bucket])
    found = muon_parameters([chunk], [buffer], 1, MuonConfig())
    assert [parameter.name for _, parameter in found] == ["1.weight"]


@pytest.mark.parametrize(
    ("local_rows", "tp_size", "sizes"),
    [
        (28, 2, SIZES),  # gated attention has a fourth block
        (10, 4, SIZES),  # fewer query groups than TP ranks
    ],
)
def test_a_qkv_of_another_shape_is_refused(
    local_rows: int, tp_size: int, sizes: dict[str, int]
) -> None:
    weight = _weight(local_rows, 24, tensor_model_parallel=True, partition_dim=0)
    with pytest.raises(NotImplementedError, match="cannot split it, set split_qkv=False"):
        _found(_Chunk(QKV, weight, **sizes), tp_size)


@pytest.mark.parametrize(
    ("marks", "shape"),
    [
        ({"tensor_model_parallel": True, "partition_dim": 0}, (12, 5)),
        ({"tensor_model_parallel": True, "partition_dim": 1}, (6, 10)),
        ({"tensor_model_parallel": False, "partition_dim": -1}, (6, 5)),
        ({}, (6, 5)),
    ],
)
def test_the_whole_matrix_follows_the_partition_dim(
    marks: dict[str, Any], shape: tuple[int, int]
) -> None:
    chunk = _Chunk("decoder.layers.0.mlp.linear_fc2.weight", _weight(6, 5, **marks), **SIZES)
    found = _found(chunk, 2)
    (matrix,) = found.matrices
    assert (matrix.rows, matrix.cols) == shape
    assert found.replicated == (shape == (6, 5))


def test_chunks_of_a_virtual_pipeline_have_names_of_their_own() -> None:
    chunks = [_Chunk("module.decoder.weight", _weight(2, 2), **SIZES) for _ in range(2)]
    names = [name for name, _ in named_parameters(chunks)]
    assert names == ["chunk0.decoder.weight", "chunk1.decoder.weight"]
