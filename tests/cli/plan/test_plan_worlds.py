"""A plan of 64 and of 512 ranks equals what those ranks do, by Megatron's whole
optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megatron_muon.lab.plan.command import command_line
from megatron_muon.lab.plan.kinds import planned_kinds
from megatron_muon.lab.pricing.memory import at_rest, peaks
from megatron_muon.lab.pricing.work import traffic_of
from megatron_muon.lab.routes.model_flags import import_megatron, megatron_is_quiet
from support.virtual_gpu.megatron import OptimizerSettings, record_training
from support.virtual_gpu.rank_report import report_of

LAYERS = (
    "--num-layers 4 --hidden-size 512 --ffn-hidden-size 1536 --num-attention-heads 8 "
    "--swiglu --vocab-size 1024 --bf16 --position-embedding-type rope "
    "--transformer-impl local --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --untie-embeddings-and-output-weights "
    "--disable-bias-linear "
)
TP = "--tensor-model-parallel-size"
BLOCKS, TABLES = 4 << 10, 16 << 10  # bytes


@dataclass(frozen=True)
class World:
    words: str
    ranks: tuple[int, ...]


WORLDS = [
    World(f"{TP} 8 --world-size 64", (0, 27, 63)),
    World(f"{TP} 4 --pipeline-model-parallel-size 2 --world-size 512", (0, 130)),
    World(
        "--num-experts 16 --moe-ffn-hidden-size 256 --expert-model-parallel-size 8 "
        "--world-size 64",
        (0, 41),
    ),
]


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.words)
def test_bytes_messages_and_memory_are_those_of_the_rank(world: World) -> None:
    import_megatron("a test")
    run = command_line((LAYERS + world.words).split()).settled()
    with megatron_is_quiet():
        kind = planned_kinds([run], "cuda", range(1))[0]
    (optimizers,) = kind.optimizers
    plans = [one.plan for one in optimizers]
    sent = traffic_of(plans, [0] * plans[0].size)
    rest = at_rest(optimizers)
    over = peaks(plans, run.config)
    for rank in world.ranks:
        at = kind.members.index(rank)
        recording = record_training(
            run.flags, run.ranks, rank, run.config, OptimizerSettings()
        ).recording
        report = report_of(recording)
        assert (report.sent, report.messages) == (sent.sent[at], sent.messages[at])
        assert report.connections == sent.peers[at]
        for name, nbytes in rest[
            at
        ].items():  # an allocator rounds each tensor up to 512 bytes
            assert nbytes == pytest.approx(report.state.get(name, 0), abs=BLOCKS)
        assert sum(rest[at].values()) == pytest.approx(report.state_bytes, abs=TABLES)
        assert over[at] == pytest.approx(report.peak_bytes, abs=BLOCKS)
