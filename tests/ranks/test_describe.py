"""The lines that a run prints at its start, against what Megatron's buffers really
hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_muon.lab.routes.sentences import optimizer_text
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.layout import Parameter, Span
from megatron_muon.planning.plan import ExchangePlan, make_plan
from megatron_muon.planning.sections import whole_matrix
from megatron_muon.settings.config import MuonConfig
from support.models.gpt import (
    Case,
    Topology,
    error_of_start,
    muon_weights,
    on_ranks,
    printed_by,
    start,
    truth,
)
from support.runs.topologies import DP2, DP4, PP2, TP2, TP2_EP2_ETP1, TP2_PP2
from support.started import lines_at_start


def _start_line(case: Case, topology: Topology) -> dict[str, Any]:
    built, printed = printed_by(lambda: start(case, topology))
    buckets = [len(buffer.buckets) for buffer in built.ddp.buffers]
    shards_of: dict[
        str, set[int]
    ] = {}  # Muon parameter -> shards of its bucket that hold some
    for buffer in built.ddp.buffers:
        for name, param in built.params.items():
            if param.dim() == 2 and "embedding" not in name and "output" not in name:
                begin, end, bucket_id = buffer.param_index_map[param]
                bucket = buffer.buckets[bucket_id]
                size = bucket.grad_data.numel() // topology.dp
                places = range(begin - bucket.offset, end - bucket.offset)
                shards_of[name] = {place // size for place in places}
    cut = [name for name, shards in shards_of.items() if len(shards) > 1]
    return {
        "printed": printed,
        "text": optimizer_text(built.part.muon.plan, experts=False, buckets=buckets),
        "buckets": sum(buckets),
        "boundary": len(cut),
        "parameters": len(shards_of),
    }


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_stages_sentence_has_its_buckets_and_boundary_parameters(
    overlap: bool,
) -> None:
    topology = Topology(tp=2, pp=2, dp=2, overlap=overlap)
    ranks = on_ranks(_start_line, Case(), topology)
    for rank in ranks:
        cut = f"{rank['parameters']} weights, {rank['boundary']} of them cut by the "
        assert f"{cut}shards of {rank['buckets']} gradient bucket(s). " in rank["text"]
        assert rank["boundary"] <= rank["buckets"] * (topology.dp - 1)
    assert all(rank["printed"] == "" for rank in ranks[1:])


def _printed(case: Case, topology: Topology) -> str:
    """All that a rank prints."""
    return printed_by(lambda: start(case, topology))[1]


def _shares(case: Case) -> tuple[int, int, int, int]:
    """Elements of all, of Muon's, and of those that a token activates, of one process'
    model.
    """
    main = truth(replace(case, steps=0))["main"]
    weights = {
        name: tensor.numel()
        for name, tensor in main.items()
        if not name.startswith("unused")
    }
    muon = muon_weights(case)
    used = {
        name: n * 2 // 4 if ".experts." in name else n  # the router picks 2 of 4
        for name, n in weights.items()
    }
    return (
        sum(weights.values()),
        sum(n for name, n in weights.items() if name in muon),
        sum(used.values()),
        sum(n for name, n in used.items() if name in muon),
    )


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        (Case(), TP2_PP2),
        (Case(tied=True), PP2),
        (Case(frozen=("embedding.*",)), DP2),  # which are not counted
        (Case(moe=True), TP2_EP2_ETP1),
        (
            Case(moe=True, grouped="te"),
            Topology.of("tp2 dp2 sp ep2 etp2"),
        ),
        (Case(mla="duplicated"), TP2),
    ],
)
def test_the_share_of_all_and_of_activated_parameters_is_the_models(
    case: Case, topology: Topology
) -> None:
    total, muon, active, active_muon = _shares(case)
    first, *others = on_ranks(_printed, case, topology)
    assert len(lines_at_start(first)) <= 6
    (line,) = [x for x in first.splitlines() if "Muon has" in x]
    of_all = f"Muon has {muon / total:.1%} of the model's {total / 1000:.3g} k"
    assert f"{of_all} trainable parameters" in line
    assert (
        f"and {active_muon / active:.1%} of the {active / 1000:.3g} k" in line
    ) == case.moe
    assert not any("Muon has" in other for other in others)
    assert "warning" not in first


def test_the_warning_names_the_pattern_by_which_most_weights_stayed() -> None:
    """The exclusion is on every stage, the embedding on the first one."""
    case = Case().with_muon(muon_exclude=("*.linear_fc*",))
    printed, _ = on_ranks(_printed, case, PP2)
    (warning,) = [
        x for x in printed.splitlines() if "warning: Muon updates less than half" in x
    ]
    assert "(muon_exclude (--muon-exclude) '*.linear_fc*'), " in warning
    assert "embeddings and the output layer" in warning


def test_a_run_without_a_matrix_for_muon_is_an_error_on_every_rank() -> None:
    of_nothing = Case().with_muon(muon_exclude=("*",))
    for text in on_ranks(error_of_start, of_nothing, PP2):
        assert text.startswith("ValueError: Muon has none of the model's "), text
        assert (
            "(muon_exclude (--muon-exclude) '*')" in text
            and "or choose optimizer='adam' (--optimizer adam)" in text
        )
    of_one_stage = Case().with_muon(muon_exclude=("*.layers.0.*",))
    assert on_ranks(error_of_start, of_one_stage, PP2) == ["no error", "no error"]


def _nodes_of(case: Case, topology: Topology, here: str) -> tuple[int, str]:
    """The plan's neighbours, and what is printed, where a launcher has so many ranks a
    machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", here)
        built, printed = printed_by(lambda: start(case, topology))
    return built.part.muon.plan.grid.neighbours, printed


@pytest.mark.parametrize(
    ("node_ranks", "here", "neighbours", "warned"),
    [
        (8, "2", 8, "a machine has 2 ranks, and node_ranks (--muon-node-ranks) is 8"),
        (8, "4", 8, ""),  # one machine
        (8, "4(x2)", 8, ""),  # another launcher's
        (2, "2", 2, ""),
    ],
)
def test_a_run_knows_its_nodes(
    node_ranks: int, here: str, neighbours: int, warned: str
) -> None:
    case = Case().with_muon(node_ranks=node_ranks, split_matrices=4)
    found = on_ranks(_nodes_of, case, DP4, here)
    assert [one for one, _ in found] == [neighbours] * 4
    warnings = [text for _, text in found if "warning: a machine" in text]
    assert len(warnings) == bool(warned) and all(warned in text for text in warnings)


def test_the_busiest_rank_is_that_of_all_of_the_stages_optimizers() -> None:
    """Rank 0 has a dense matrix, rank 1 an expert: each plan is uneven, both together
    are even.
    """
    matrices, blocks = whole_matrix("a", (10, 10), 0, 1)

    def plan_of(start: int) -> ExchangePlan:
        held = Parameter(
            "a",
            (10, 10),
            0,
            Span(0, 200),
            Span(start, start + 100),
            0,
            matrices,
            blocks,
        )
        return make_plan([held], RankGrid((((0, 1),),)), Numerics(MuonConfig()))

    dense = plan_of(0)
    experts = plan_of(100)
    alone = optimizer_text(experts, experts=True, buckets=[1])
    assert alone.endswith(
        "flop a step on the stage, 2.00 × the mean on the busiest rank"
    )
    own = optimizer_text(experts, experts=True, buckets=[1], rule="torch:sign")
    assert "flop" not in own
    assert own.endswith(
        "if it were Newton-Schulz's: 2.00 × the mean on the busiest rank"
    )
    both = optimizer_text(experts, experts=True, buckets=[1], earlier=[dense])
    assert both.endswith("1.00 × the mean on the busiest rank, with the matrices above")
