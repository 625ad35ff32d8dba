"""Models by Megatron-LM's flags, and the exchange plans that a run makes for them."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import megatron_muon.cpu
from megatron_muon.lab.routes.model_flags import Settled
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.layout import (
    Parameter,
    Span,
    whole_matrix,
)
from megatron_muon.planning.plan import ExchangePlan, make_plan
from megatron_muon.planning.sections import Rows, repeated, sectioned
from megatron_muon.settings.config import MuonConfig

_COMMON = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --bf16 --use-distributed-optimizer "
)
_LLAMA = _COMMON + (
    "--group-query-attention --num-query-groups 8 --padded-vocab-size 128256 --seq-length 8192 "
    "--max-position-embeddings 8192 "
)
LLAMA_8B = _LLAMA + (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
)
LLAMA_70B = _LLAMA + (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
)
LLAMA_405B = _LLAMA + (
    "--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 "
)
QWEN3_30B = _COMMON + (
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
    "--kv-channels 128 --group-query-attention --num-query-groups 4 --qk-layernorm "
    "--padded-vocab-size 151936 --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8 "
    "--seq-length 4096 --max-position-embeddings 4096 "
)
OVERLAP = "--overlap-grad-reduce --overlap-param-gather "


@dataclass(frozen=True, slots=True)
class Model:
    """A run."""

    name: str  # as it is printed
    words: str  # Megatron-LM's flags
    stage: int = 0  # the pipeline stage that is looked at


MODELS = (
    Model("Llama-3-8B TP1 DP8", LLAMA_8B + OVERLAP + "--world-size 8"),
    Model(
        "Llama-3-8B TP2 DP4",
        LLAMA_8B + OVERLAP + "--tensor-model-parallel-size 2 --world-size 8",
    ),
    Model(
        "Llama-3-8B TP8 DP8",
        LLAMA_8B + OVERLAP + "--tensor-model-parallel-size 8 --world-size 64",
    ),
    Model(
        "Llama-3-70B TP8 PP4 DP16",
        LLAMA_70B
        + OVERLAP
        + "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --world-size 512",
        stage=1,
    ),
    Model(
        "Qwen3-30B-A3B EP8, 8 ranks",
        QWEN3_30B + OVERLAP + "--expert-model-parallel-size 8 --world-size 8",
    ),
)


def small_plan(
    config: MuonConfig, tp: int = 2, dp: int = 4, layers: int = 3, hidden: int = 64, ffn: int = 160
) -> ExchangePlan:
    """Llama-like layers, each with a router, in one buffer that is cut wherever a shard ends."""
    size, parameters = 0, []
    shapes = [shape for layer in range(layers) for shape in _layer(layer, tp, hidden, ffn)]
    padded = -(-sum(rows * cols for _, (rows, cols), _, _ in shapes) // (dp * 16)) * dp * 16
    for name, shape, dim, (matrices, blocks) in shapes:
        span = Span(size, size + shape[0] * shape[1])
        parameters.append(Parameter(name, shape, dim, Span(0, padded), span, 0, matrices, blocks))
        size = span.stop
    grid = RankGrid((tuple(tuple(t + tp * d for d in range(dp)) for t in range(tp)),))
    return make_plan(parameters, grid, Numerics(config))


def _layer(layer: int, tp: int, hidden: int, ffn: int) -> Iterator[tuple[str, Any, Any, Any]]:
    """(name, local shape, partitioned dim, matrices and blocks) of each of its weights."""
    name, shape = f"{layer}.linear_proj", (hidden, hidden // tp)
    yield name, shape, 1, whole_matrix(name, shape, 1, tp)
    name, shape = f"{layer}.linear_qkv", (3 * hidden // tp, hidden)
    groups = repeated(3 * hidden // 24, (("q", 8), ("k", 8), ("v", 8)))
    yield name, shape, 0, sectioned(name, shape, 0, tp, groups)
    name, shape = f"{layer}.linear_fc1", (2 * ffn // tp, hidden)
    yield name, shape, 0, sectioned(name, shape, 0, tp, ((Rows("", ffn),), (Rows("", ffn),)))
    name, shape = f"{layer}.linear_fc2", (hidden, ffn // tp)
    yield name, shape, 1, whole_matrix(name, shape, 1, tp)
    name, shape = f"{layer}.router", (8, hidden)
    yield name, shape, None, whole_matrix(name, shape, None, tp)


def flags_of(words: Sequence[str]) -> Namespace:
    """Megatron-LM's flags, with the buckets that Muon chooses where none are given."""
    return settled_flags(words)[0]


def settled_flags(words: Sequence[str]) -> tuple[Namespace, Settled]:
    """``flags_of``, and the run that they ask for."""
    with _quiet():
        from megatron_muon.lab.routes.command import _parser
        from megatron_muon.lab.routes.model_flags import CommandLine

        run = CommandLine(_parser(), list(words)).settled()
        return run.flags, run


def plans_of(model: Model, **settings: object) -> tuple[MuonConfig, list[tuple[str, ExchangePlan]]]:
    """The settings, and ``dense`` and ``experts`` plans of a stage, as the run makes them."""
    if not megatron_muon.cpu.enabled():
        megatron_muon.cpu.enable(allow_cuda=True)
    from megatron_muon.lab.routes.model_flags import muon_settings
    from support.virtual_gpu.dry_run import built, planned_optimizers, ranks_of, world

    flags = flags_of(model.words.split())
    config = dataclasses.replace(muon_settings(flags), **settings)
    ranks = ranks_of(flags)
    with _quiet(), world.as_rank(world.first_ranks(ranks)[model.stage], ranks):
        planned = planned_optimizers(flags, config, ranks, built(flags, config, ranks))
    return config, [("experts" if one.experts else "dense", one.plan) for one in planned]


@contextmanager
def _quiet() -> Iterator[None]:
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
