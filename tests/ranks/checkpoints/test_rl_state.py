"""State as frameworks of reinforcement learning save, load and move it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from support.checkpoints.resuming import check
from support.checkpoints.saving import AREALS, VERLS, load_parameter_state, save
from support.models.gpt import Case, Topology, on_ranks, start, stepped, take_step
from support.ranks import error_of
from support.runs.topologies import DP2, DP2_EP2, DP3_OVERLAP

DENSE = Case()
EXPERTS = Case(moe=True)


@pytest.mark.parametrize("dirty", [False, True], ids=["", "over-a-run"])
@pytest.mark.parametrize("format", [VERLS, AREALS])
@pytest.mark.parametrize(
    ("case", "topology"), [(DENSE, DP3_OVERLAP), (EXPERTS, DP2_EP2)]
)
def test_a_checkpoint_without_metadata_resumes(
    case: Case, topology: Topology, format: str, dirty: bool, tmp_path: Path
) -> None:
    check(case, topology, format, tmp_path, dirty=dirty)


def _groups_alone(
    case: Case, topology: Topology, folder: Path, adds_state: bool
) -> list[str]:
    """A run's ``state_dict`` in a new optimizer: its next step, and one where it came
    from.
    """
    built = stepped(case, topology, 1)
    save(built, folder, "torch")
    state = built.optimizer.state_dict()
    errors = []
    for again in (False, True):
        built = start(case, topology) if again else built
        built.optimizer.load_state_dict(state)
        if adds_state:
            load_parameter_state(built, folder, "torch")
        errors.append(error_of(partial(take_step, built, 1)))
    return errors


def _of_padding(case: Case, topology: Topology, padded: tuple[int, ...]) -> str:
    """The error of a step after a load; ranks of ``padded`` had only padding to
    load.
    """
    built = start(case, topology)
    state = built.optimizer.state_dict()
    if dist.get_rank() in padded:
        state["param_state_sharding_type"] = "fully_sharded_model_space"
    built = start(case, topology)
    built.optimizer.load_state_dict(state)
    return error_of(partial(take_step, built, 0))


@pytest.mark.parametrize("padded", [(0,), (0, 1)])
def test_a_rank_with_padding_alone_is_refused_only_with_all(
    padded: tuple[int, ...],
) -> None:
    for error in on_ranks(_of_padding, DENSE, DP2, padded):
        assert ("momentum would start at zero" in error) is (len(padded) == 1), error


@pytest.mark.parametrize("adds_state", [False, True])
@pytest.mark.parametrize(("case", "topology"), [(DENSE, DP2), (EXPERTS, DP2_EP2)])
def test_a_state_dict_alone_is_no_momentum(
    case: Case, topology: Topology, adds_state: bool, tmp_path: Path
) -> None:
    """``state_dict`` has none, in Megatron too; adapters are often saved by it
    alone.
    """
    for old, new in on_ranks(_groups_alone, case, topology, tmp_path, adds_state):
        assert "momentum would start at zero" not in old
        assert ("momentum would start at zero" in new) is not adds_state, new
