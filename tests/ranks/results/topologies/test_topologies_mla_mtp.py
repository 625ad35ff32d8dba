"""As test_topologies, for multi-latent attention and multi-token prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.models.gpt import Case, Topology, build, check, trained, truth
from support.models.gpt_model import DOWN_PROJECTIONS
from support.ranks import run
from support.runs.cases import TIED
from support.runs.mutants import believed_marks
from support.runs.whole import differences

COLUMN = Case(mla="column", steps=5)
DUPLICATED = Case(mla="duplicated", steps=5)
MTP = Case(mtp=True, steps=5)


@pytest.mark.parametrize(
    "topology", [Topology(2, 1, 1), Topology(2, 1, 2), Topology(2, 2, 2)], ids=str
)
@pytest.mark.parametrize("case", [COLUMN, DUPLICATED], ids=["column", "duplicated"])
def test_multi_latent_attention(case: Case, topology: Topology) -> None:
    check(case, topology)


@pytest.mark.parametrize("case", [COLUMN, DUPLICATED], ids=["column", "duplicated"])
def test_multi_latent_attention_in_fp32_with_overlap(case: Case) -> None:
    fp32 = replace(case, bf16=False, muon=(("ns_dtype", "fp32"),))
    check(fp32, Topology(2, 1, 2, overlap=True, sequence_parallel=True))


def test_multi_latent_attention_with_grouped_experts() -> None:
    """About DeepSeek's layer, as Transformer Engine marks it."""
    case = replace(DUPLICATED, moe=True, grouped="te", gated=True)
    check(case, Topology(tp=2, dp=2, ep=2, sequence_parallel=True))


def _marks() -> dict[str, tuple[bool, int, tuple[int, ...]]]:
    built = build(DUPLICATED, Topology(tp=2))
    return {
        name: (param.tensor_model_parallel, param.partition_dim, tuple(param.shape))
        for name, param in built.params.items()
        if name.endswith(DOWN_PROJECTIONS)
    }


def test_duplicated_weights_are_really_marked_as_partitioned() -> None:
    for marks in run(_marks, 2):
        assert len(marks) == 2 * DUPLICATED.layers
        assert {mark[:2] for mark in marks.values()} == {(True, 0)}
        whole = truth(DUPLICATED)["params"]
        assert all(shape == whole[name].shape for name, (*_, shape) in marks.items())


def test_mutant_that_believes_the_marks_is_noticed() -> None:
    unlike = differences(truth(DUPLICATED), trained(DUPLICATED, Topology(tp=2), believed_marks))
    assert unlike and all(name.endswith(DOWN_PROJECTIONS) for name in unlike)


@pytest.mark.parametrize("topology", [Topology(pp=2), Topology(2, 2, 2)], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_multi_token_prediction(tied: bool, topology: Topology) -> None:
    """The copy of the embedding on the last stage never goes to Muon: ``check`` knows what does,
    and ``whole`` wants all copies to have the same state."""
    result = check(replace(MTP, tied=tied), topology)
    assert TIED in result["exp_avg_sq"]


def test_last_stage_really_has_a_copy_of_the_embedding() -> None:
    for tied in (False, True):
        first, last = run(_names, 2, replace(MTP, tied=tied), Topology(pp=2))
        assert TIED in first and TIED in last
        assert "output_layer.weight" not in first
        assert ("output_layer.weight" in last) is not tied


def _names(case: Case, topology: Topology) -> set[str]:
    return set(build(case, topology).params)


def test_column_parallel_and_duplicated_down_projections_are_the_same_model() -> None:
    """In one process the two differ by marks only."""
    assert differences(truth(COLUMN), truth(DUPLICATED)) == []
