"""Which fused projections are split: by the class of the attention, whatever it is
called.

All modules are Megatron's own, on ranks of a real run, or hold Megatron's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

import megatron_muon
from support.installed import VERSION
from support.models.gpt import Case, Topology, printed_by, start
from support.models.gpt_model import initialize_parallel_state, transformer_config
from support.ranks import run
from support.runs.topologies import TP2, TP2_PP2

CASE = Case(steps=0)


# --- attentions of many kinds in one model --------------------------------------------


@dataclass(frozen=True)
class Held:
    """An attention in a model of 6 heads of 16 in 2 groups."""

    rows: list[int]  # of its matrices
    kind: str = (
        "SelfAttention"  # SelfAttention or CrossAttention: a subclass of Megatron's
    )
    # of its own settings, where they are not the model's
    sizes: dict[str, Any] = field(default_factory=dict)
    path: str = ""  # what holds its fused linear, where it is not the attention itself
    is_foreign: bool = False  # the linear is in a class that is not Megatron's


_GATED = Held([96, 96, 32, 32], sizes={"attention_output_gate": True})
HELD = {
    "self_attention": Held([96, 32, 32]),
    "attention": Held([96, 32, 32]),
    "vision": Held(
        [32, 32, 32],
        sizes={"num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 8},
    ),
    "one_group": Held([96, 16, 16], sizes={"num_query_groups": 1}),
    "wrapped": Held([96, 32, 32], path="to_wrap"),
    "cross": Held([96, 96], "CrossAttention", {"num_query_groups": 6}),
    # by the name of its linear, and as many rows as the model's have
    "foreign": Held([96, 32, 32], is_foreign=True),
    "foreign_of_other_sizes": Held(
        [192], sizes={"num_attention_heads": 8}, is_foreign=True
    ),
    **({"gated": _GATED} if VERSION >= (0, 16) else {}),
}


class Holder(torch.nn.Module):
    """Of a class that nobody knows, around one module."""

    def __init__(self, name: str, inner: torch.nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)


def _attention(held: Held, topology: Topology) -> torch.nn.Module:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    is_cross = held.kind == "CrossAttention"
    fused = ("linear_q", "linear_kv") if is_cross else ("linear_qkv",)
    submodules = getattr(attention, f"{held.kind}Submodules")(
        **dict.fromkeys(fused, ColumnParallelLinear),
        **({} if is_cross else {"q_layernorm": None, "k_layernorm": None}),
        linear_proj=RowParallelLinear,
        core_attention=DotProductAttention,
    )
    config = transformer_config(CASE, topology)
    for name, value in held.sizes.items():
        setattr(config, name, value)
    of_megatron = getattr(attention, held.kind)
    made = type(f"My{held.kind}", (of_megatron,), {})(
        config, submodules, 1, AttnMaskType.causal
    )
    if held.path:
        made.linear_qkv = Holder(held.path, made.linear_qkv)
    if held.is_foreign:
        linear = made.linear_qkv
        linear.config = transformer_config(CASE, topology)
        return Holder("linear_qkv", linear)
    return made


def _rows_of_matrices(topology: Topology) -> tuple[dict[str, list[int]], list[str]]:
    """By what holds the attention; and the fused weights whose order of rows is not
    known.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_muon.mcore.host.process_groups import Sizes
    from megatron_muon.mcore.routing.matrices import matrices_of
    from megatron_muon.mcore.routing.param_routing import weights
    from megatron_muon.mcore.routing.routes import routes_of
    from megatron_muon.mcore.routing.survey import share_of

    initialize_parallel_state(topology)
    model_parallel_cuda_manual_seed(1)
    model = torch.nn.Module()
    model.config = transformer_config(CASE, topology)
    for name, held in HELD.items():
        model.add_module(name, _attention(held, topology))
    settings = megatron_muon.MuonConfig()
    sizes = Sizes(topology.tp)
    here = list(weights([model], sizes))
    rows = {}
    for weight in here:
        fused = "linear_qkv" in weight.name or "linear_kv" in weight.name
        if fused and weight.param.dim() == 2:
            matrices = matrices_of(weight, settings).matrices
            rows[weight.name.split(".")[0]] = [matrix.rows for matrix in matrices]
    remarks = share_of(routes_of([model], sizes, settings), settings).remarks
    return rows, [text for text in remarks if "order of its rows" in text]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_megatrons_attention_is_split_by_its_own_sizes_whatever_holds_it(
    tp_size: int,
) -> None:
    if tp_size > 1 and VERSION < (0, 16):
        pytest.skip("one query group on several TP ranks is since core 0.16")
    for rows, unknown in run(_rows_of_matrices, tp_size, Topology(tp=tp_size)):
        assert rows == {name: held.rows for name, held in HELD.items()}
        assert unknown == [
            "foreign_of_other_sizes.linear_qkv.weight (in Holder) is one matrix, since "
            "the order of its rows is not known"
        ]


# --- a run's start --------------------------------------------------------------------


@contextmanager
def _changed_layers(change: Callable[[Any], None]) -> Iterator[None]:
    """Within it the layers of a GPT are changed once they are built."""
    from support.models import gpt

    original = gpt.gpt

    def changed(*args: Any) -> Any:
        model = original(*args)
        for layer in model.decoder.layers:
            change(layer)
        return model

    with mock.patch.object(gpt, "gpt", changed):
        yield


def renamed() -> Any:
    """Megatron's SelfAttention as ``attention``."""

    def change(layer: Any) -> None:
        layer.attention = layer._modules.pop("self_attention")

    return _changed_layers(change)


def foreign() -> Any:
    """Its fused linear as ``qkv`` of another class."""

    def change(layer: Any) -> None:
        layer.attention = Holder("qkv", layer._modules.pop("self_attention").linear_qkv)

    return _changed_layers(change)


def _started(
    topology: Topology, how: Callable[[], Any], split: bool = True
) -> tuple[int, list[str]]:
    """Matrices of this rank's stage, and what it prints at its start."""
    case = Case(steps=0).with_muon(split_qkv=split)
    with how():
        built, printed = printed_by(lambda: start(case, topology))
    return len(built.part.muon.plan.matrices), printed.splitlines()


def test_an_attention_by_another_name_has_as_many_matrices() -> None:
    """With ``split_qkv`` off two less in each of both layers."""
    ours, plain = (run(_started, 2, TP2, how) for how in (renamed, nullcontext))
    assert [count for count, _ in ours] == [count for count, _ in plain] == [12, 12]
    assert not any("is one matrix" in line for _, lines in ours for line in lines)
    assert [count for count, _ in run(_started, 2, TP2, nullcontext, False)] == [8, 8]


def test_a_fused_weight_whose_rows_are_not_known_is_named_in_one_line_of_the_run() -> (
    None
):
    """Of both layers, each on a stage of its own."""
    said = [line for _, lines in run(_started, 4, TP2_PP2, foreign) for line in lines]
    (line,) = (line for line in said if "qkv" in line)
    assert line == (
        "[megatron_muon] unusual: decoder.layers.*.attention.qkv.weight (in Holder) is "
        "one matrix, since the order of its rows is not known"
    )
    said = [
        line for _, lines in run(_started, 4, TP2_PP2, foreign, False) for line in lines
    ]
    assert not any("qkv" in line for line in said)  # as it was asked for
