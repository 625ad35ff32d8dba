"""Models by Megatron-LM's flags, and the exchange plans of runs with them."""

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
from megatron_muon.lab.dry_run.model import Run
from megatron_muon.lab.dry_run.presets import PRESETS
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.layout import Parameter, Span
from megatron_muon.planning.plan import ExchangePlan, make_plan
from megatron_muon.planning.sections import Rows, sectioned, whole_matrix
from megatron_muon.settings.config import MuonConfig
from support.sections import repeated

# Of published models, whose vocabulary is not padded further where TP is larger.
LLAMA_8B, LLAMA_70B, LLAMA_405B, QWEN3_30B = (
    PRESETS[name].replace("--vocab-size", "--padded-vocab-size") + " "
    for name in ("llama3-8b", "llama3-70b", "llama3-405b", "qwen3-30b-a3b")
)
GPT = (
    "--bf16 --use-distributed-optimizer --seq-length 1024 --max-position-embeddings "
    "1024 --padded-vocab-size 50304 "
)
GPT_340M = GPT + "--num-layers 12 --hidden-size 1536 --num-attention-heads 12 "
OVERLAP = "--overlap-grad-reduce --overlap-param-gather "


@dataclass(frozen=True, slots=True)
class Model:
    """A run."""

    name: str  # as it is printed
    words: str  # Megatron-LM's flags
    stage: int = 0  # the pipeline stage that is looked at


TP, PP, EP = (
    f"--{kind}-model-parallel-size" for kind in ("tensor", "pipeline", "expert")
)
MODELS = (
    Model("Llama-3-8B TP1 DP8", f"{LLAMA_8B}{OVERLAP}--world-size 8"),
    Model("Llama-3-8B TP2 DP4", f"{LLAMA_8B}{OVERLAP}{TP} 2 --world-size 8"),
    Model("Llama-3-8B TP8 DP8", f"{LLAMA_8B}{OVERLAP}{TP} 8 --world-size 64"),
    Model(
        "Llama-3-70B TP8 PP4 DP16",
        f"{LLAMA_70B}{OVERLAP}{TP} 8 {PP} 4 --world-size 512",
        1,
    ),
    Model("Qwen3-30B-A3B EP8, 8 ranks", f"{QWEN3_30B}{OVERLAP}{EP} 8 --world-size 8"),
)


def small_plan(
    config: MuonConfig,
    tp: int = 2,
    dp: int = 4,
    layers: int = 3,
    hidden: int = 64,
    ffn: int = 160,
) -> ExchangePlan:
    """Llama-like layers, each with a router, in one buffer that is cut wherever a shard
    ends.
    """
    size, parameters = 0, []
    shapes = [
        shape for layer in range(layers) for shape in _layer(layer, tp, hidden, ffn)
    ]
    padded = (
        -(-sum(rows * cols for _, (rows, cols), _, _ in shapes) // (dp * 16)) * dp * 16
    )
    for name, shape, dim, (matrices, blocks) in shapes:
        span = Span(size, size + shape[0] * shape[1])
        parameters.append(
            Parameter(name, shape, dim, Span(0, padded), span, 0, matrices, blocks)
        )
        size = span.stop
    grid = RankGrid((tuple(tuple(t + tp * d for d in range(dp)) for t in range(tp)),))
    return make_plan(parameters, grid, Numerics(config))


def _layer(
    layer: int, tp: int, hidden: int, ffn: int
) -> Iterator[tuple[str, Any, Any, Any]]:
    """(name, local shape, partitioned dim, matrices and blocks) of each of its
    weights.
    """
    name, shape = f"{layer}.linear_proj", (hidden, hidden // tp)
    yield name, shape, 1, whole_matrix(name, shape, 1, tp)
    name, shape = f"{layer}.linear_qkv", (3 * hidden // tp, hidden)
    groups = repeated(3 * hidden // 24, (("q", 8), ("k", 8), ("v", 8)))
    yield name, shape, 0, sectioned(name, shape, 0, tp, groups)
    name, shape = f"{layer}.linear_fc1", (2 * ffn // tp, hidden)
    groups = ((Rows("", ffn),),) * 2
    yield name, shape, 0, sectioned(name, shape, 0, tp, groups)
    name, shape = f"{layer}.linear_fc2", (hidden, ffn // tp)
    yield name, shape, 1, whole_matrix(name, shape, 1, tp)
    name, shape = f"{layer}.router", (8, hidden)
    yield name, shape, None, whole_matrix(name, shape, None, tp)


def flags_of(words: Sequence[str]) -> Namespace:
    """Megatron-LM's flags, with the buckets that Muon chooses where none are given."""
    return run_of(words).flags


def run_of(words: Sequence[str]) -> Run:
    """The run that Megatron-LM's flags ask for."""
    with _quiet():
        from megatron_muon.lab.routes.command import _parser
        from megatron_muon.lab.routes.model_flags import CommandLine

        return CommandLine(_parser(), list(words)).settled()


def plans_of(
    model: Model, **settings: object
) -> tuple[MuonConfig, list[tuple[str, ExchangePlan]]]:
    """The settings, and ``dense`` and ``experts`` plans of a stage, as the run makes
    them.
    """
    if not megatron_muon.cpu.enabled():
        megatron_muon.cpu.enable(allow_cuda=True)
    from megatron_muon.lab.routes.model_flags import muon_settings
    from support.virtual_gpu.dry_run import planned_on

    run = run_of(model.words.split())
    config = dataclasses.replace(muon_settings(run.flags), **settings)
    with _quiet():
        (planned,) = planned_on(
            ["cuda"], dataclasses.replace(run, config=config), model.stage
        )
    return config, [
        ("experts" if one.experts else "dense", one.plan) for one in planned
    ]


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
