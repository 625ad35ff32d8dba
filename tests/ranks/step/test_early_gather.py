"""``early_param_gather`` starts gathers within the step, and changes no bit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_muon import MuonConfig
from support.installed import installed
from support.models.gpt import (
    Built,
    Case,
    Topology,
    build,
    distributed_optimizers,
    error_of_optimizer,
    held,
    make_optimizer,
    prepare_step,
    printed_by,
    start,
    train,
    trained,
    truth,
)
from support.ranks import RankError, run
from support.runs.whole import differences, whole

ON, OFF = ("early_param_gather", "on"), ("early_param_gather", "off")
ROUNDS = ("round_bytes", 1)  # one for each parameter
EARLY = (ROUNDS, ON)
DENSE = Case(muon=EARLY)
EXPERTS = Case(muon=EARLY, moe=True)
UNSET = Case(muon=(ROUNDS,))
FAST = Case(muon=(ROUNDS, ("preset", "fast")))
# the first has some matrices
IN_BUCKETS = Topology(dp=3, overlap=True, bucket_size=30_000)


IN_STAGES = Topology(pp=2, dp=2, overlap=True)
IN_EP = Topology(dp=4, ep=2, overlap=True)


def plain(case: Case) -> Case:
    """The same without early gathers."""
    return replace(case, muon=(*case.muon, OFF))


def without(case: Case, *patterns: str) -> Case:
    """The same with fewer matrices."""
    return replace(case, muon=(*case.muon, ("muon_exclude", patterns)))


def step_of(built: Built, step: int = 0) -> None:
    prepare_step(built, step)
    built.optimizer.step()


@contextmanager
def in_the_loop(built: Built) -> Iterator[None]:
    """As in Megatron-LM's own training loop, where ``auto`` turns them on."""
    with ExitStack() as stack:
        for part in distributed_optimizers(built.optimizer):
            if part.early_gathers is not None:
                stack.enter_context(part.early_gathers.turned_on())
        yield


RUNS = {
    "dp3": (DENSE, IN_BUCKETS),
    "AdamW's parameters alone": (DENSE, Topology(dp=3, overlap=True)),
    "tp2-pp2-dp2": (DENSE, Topology(2, 2, 2, overlap=True)),
    "one round, so after the step": (replace(DENSE, muon=(ON,)), IN_BUCKETS),
    "fp16": (replace(DENSE, bf16=False, fp16=True, steps=5), IN_BUCKETS),
    "fp32": (replace(DENSE, bf16=False), IN_BUCKETS),
    "tied": (replace(DENSE, tied=True), IN_STAGES),
    "chunks": (replace(DENSE, layers=4), replace(IN_STAGES, chunks=2)),
    "instances": (DENSE, Topology(dp=4, instances=2, overlap=True)),
    "experts": (EXPERTS, IN_EP),
    "experts without a round": (without(EXPERTS, "*experts*"), IN_EP),
    "a stage without a round": (without(DENSE, "*layers.0.*"), IN_STAGES),
    "experts-tp2": (
        EXPERTS,
        Topology(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True, overlap=True),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_no_bit_changes(name: str) -> None:
    case, topology = RUNS[name]
    assert differences(truth(plain(case)), trained(case, topology)) == []


@contextmanager
def too_early() -> Iterator[None]:
    """All gathers start after AdamW's part, whichever rounds have their parameters."""
    from megatron_muon.mcore.wiring.buffers.early_gathers import EarlyGathers

    applied = EarlyGathers.applied
    with mock.patch.object(
        EarlyGathers, "applied", lambda self, _: applied(self, self.last - 1)
    ):
        yield


@contextmanager
def one_by_one() -> Iterator[None]:
    """As on a GPU with one hardware queue."""
    from megatron_muon.mcore.wiring import build as built_by

    with mock.patch.object(built_by, "gathers_one_by_one", lambda device: True):
        yield


@pytest.mark.parametrize(("how", "same"), [(one_by_one, True), (too_early, False)])
def test_a_gather_before_its_round_is_found_and_one_by_one_changes_no_bit(
    how: Callable[[], Any], same: bool
) -> None:
    found = differences(truth(plain(DENSE)), trained(DENSE, IN_BUCKETS, how))
    assert (found == []) is same


@dataclass(frozen=True, slots=True)
class Order:
    """What a step and the forward pass after it do in turn."""

    kinds: str  # ``r`` for a round that is applied, ``g`` for a gather that starts
    started: list[int]  # bucket groups whose gather starts within the step
    # gathers that have started when the forward pass has waited for each group, and
    # ``again`` in another forward pass without a step, as after a load
    ahead: list[int]
    again: list[int]
    # whether Megatron finds that one has started before the one before it was there
    warned: bool


def _order(case: Case, topology: Topology, patch: Any = nullcontext) -> Order:
    from megatron_muon.mcore.wiring.buffers.bucket_groups import NamedBucketGroup
    from megatron_muon.runtime.round import Round

    with patch():
        built = start(case, topology)
    gather, finish = NamedBucketGroup.start_param_sync, Round.finish
    seen: list[int | None] = []
    groups = built.groups

    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(groups.index(self))
        gather(self, *args, **kwargs)

    def finished(self: Any, *args: Any) -> None:
        seen.append(None)
        finish(self, *args)

    def forget() -> None:
        for group in groups:
            group.param_gather_dispatched = False  # as the backward pass says

    def forward() -> list[int]:
        ahead = []
        for group in reversed(groups):
            group.finish_param_sync()
            ahead.append(sum(one.param_gather_dispatched for one in groups))
        forget()
        return ahead

    forget()
    with (
        in_the_loop(built),
        mock.patch.object(NamedBucketGroup, "start_param_sync", started),
        mock.patch.object(Round, "finish", finished),
        warnings.catch_warnings(record=True) as caught,
    ):
        step_of(built)
        kinds = "".join("r" if one is None else "g" for one in seen)
        first = [one for one in seen if one is not None]
        ahead = forward()
        again = forward()
    warned = any("already been dispatched" in str(one.message) for one in caught)
    return Order(kinds, first, ahead, again, warned)


AT_END = replace(DENSE, muon=(ON,))  # one round, so the only gather starts after it
SEVERAL = replace(DENSE, muon=(("round_bytes", 100_000), ON))
ORDERS: dict[str, tuple[Case, Any, str]] = {
    "once its parameters are updated": (DENSE, nullcontext, r"r+g[rg]*g?r+"),
    "several after a round": (SEVERAL, nullcontext, "rggrr"),
    "one by one, at most one after a round": (SEVERAL, one_by_one, "rgrgr"),
    "after the last round if it must": (AT_END, nullcontext, "rg"),
    "without it none": (plain(DENSE), nullcontext, "r+"),
}


@pytest.mark.parametrize("which", ORDERS)
def test_gathers_start_within_the_step(which: str) -> None:
    """What the step has not started Megatron starts, one ahead of the forward pass."""
    case, how, kinds = ORDERS[which]
    for order in run(_order, 3, case, IN_BUCKETS, how):
        assert re.fullmatch(kinds, order.kinds), order.kinds
        assert order.started == [4, 3][: order.kinds.count("g")]
        assert order.ahead == order.again == [2, 3, 4, 5, 5] and not order.warned


@pytest.mark.parametrize(
    ("case", "bucket_size", "kinds", "started"),
    [
        # while the experts step
        (replace(EXPERTS, muon=(ON,)), 1_000_000, "rgrg", [0, 1]),
        # five dense rounds, then the experts'
        (EXPERTS, 60_000, "rrrgrrgrrrrg", [1, 0, 2]),
    ],
    ids=["one round each", "one more before experts step"],
)
def test_dense_parameters_are_gathered_while_experts_step(
    case: Case, bucket_size: int, kinds: str, started: list[int]
) -> None:
    topology = replace(IN_EP, bucket_size=bucket_size)
    for order in run(_order, 4, case, topology):
        assert (order.kinds, order.started) == (kinds, started)


def _forced(built: Built) -> dict[str, Any]:
    """What this rank holds once all is gathered, by force."""
    for chunk in built.chunks:
        chunk.start_param_sync(force_sync=True)
    return held(built)


def _steps_without_a_forward_pass(case: Case, topology: Topology) -> dict[str, Any]:
    built = start(case, topology)
    with in_the_loop(built):
        for step in range(case.steps):
            step_of(built, step)
        return _forced(built)


def test_a_step_waits_for_a_gather_that_no_forward_pass_has_waited_for() -> None:
    case = replace(DENSE, clip=0.0)
    results = whole(run(_steps_without_a_forward_pass, 3, case, IN_BUCKETS))
    assert differences(truth(plain(case)), results) == []


def _gathers_again(case: Case, topology: Topology) -> list[bool]:
    """Of a load of the optimizer's state, then of one of the model."""
    built = start(case, topology)
    group, optimizer = built.ddp.bucket_groups[-1], built.optimizer
    found = []
    for load in (
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
        optimizer.reload_model_params,
    ):
        with in_the_loop(built):
            step_of(built)
            found.append(group.param_gather_handle is not None)
            load()
        found += [group.param_gather_handle is None, not group.param_gather_dispatched]
    return found


def test_what_a_load_changes_is_gathered_again() -> None:
    assert run(_gathers_again, 3, DENSE, IN_BUCKETS) == [[True] * 6] * 3


def _changed_after_a_step(case: Case, topology: Topology) -> dict[str, Any]:
    """Main parameters that something else has changed, and copied as Megatron does."""
    built = start(case, topology)
    with in_the_loop(built):
        step_of(built)
        for part in built.optimizer.chained_optimizers:
            for shards in (
                *part.shard_fp32_from_float16_groups,
                *part.shard_fp32_groups,
            ):
                for shard in shards:
                    shard.data.add_(1.0)
            part._copy_main_params_to_model_params()
        return _forced(built)


def test_a_copy_outside_of_a_step_is_gathered_again() -> None:
    early, late = (
        whole(run(_changed_after_a_step, 3, case, IN_BUCKETS))
        for case in (DENSE, plain(DENSE))
    )
    assert differences(late, early) == []


def _under_way(built: Built) -> list[Any]:
    """The handles of gathers that have started."""
    handles = [group.param_gather_handle for group in built.ddp.bucket_groups]
    return [handle for handle in handles if handle is not None]


def _in_and_out(case: Case, topology: Topology) -> list[int]:
    """How many gathers are under way after a step outside of the loop, in it, and after
    it.
    """
    built = start(case, topology)
    counts = []
    for loop in (nullcontext(), in_the_loop(built), nullcontext()):
        with loop:
            step_of(built)
            counts.append(len(_under_way(built)))
        counts.append(len(_under_way(built)))
    return counts


@pytest.mark.parametrize("case", [FAST, DENSE], ids=["fast", "on"])
def test_gathers_are_under_way_after_a_step_of_megatron_lms_loop_alone(
    case: Case,
) -> None:
    for before, _, within, *after in run(_in_and_out, 3, case, IN_BUCKETS):
        assert within > 0 and [before, *after] == [0] * 4


def _written_while_under_way(case: Case, topology: Topology) -> list[float]:
    """What the first bucket has, once each rank has written its number and forced a
    gather.
    """
    built = start(case, topology)
    with in_the_loop(built):
        step_of(built)
        (bucket,) = built.ddp.bucket_groups[-1].buckets
        for handle in _under_way(built):
            handle.wait()
        bucket.param_data.fill_(torch.distributed.get_rank())
        built.ddp.start_param_sync(force_sync=True)
    return [float(part.mean()) for part in bucket.param_data.chunk(3)]


def test_a_forced_gather_has_what_was_written_while_another_was_under_way() -> None:
    assert run(_written_while_under_way, 3, DENSE, IN_BUCKETS) == [[0.0, 1.0, 2.0]] * 3


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, Any], str]] = {
    "a graph": (
        {},
        ("cuda_graph_scope", "full_iteration"),
        "NotImplementedError: {} with a CUDA graph of the full iteration",
    ),
    "no overlap": (
        {},
        ("overlap_param_gather", False),
        "ValueError: {} starts the gathers",
    ),
    "clipped logits": (
        {"qk_clip": 100.0},
        ("overlap_param_gather", True),
        "NotImplementedError: {} with clipped attention logits",
    ),
}


def _of_a_mode(
    settings: dict[str, Any], mode: tuple[str, Any]
) -> tuple[str, bool, list[str]]:
    """The error where it is on; with fast, whether gathers start in the step and what
    is said.
    """
    built = build(Case(), Topology(dp=2, overlap=True))
    owner = (
        built.ddp.ddp_config
        if hasattr(built.ddp.ddp_config, mode[0])
        else built.ddp.config
    )
    setattr(owner, *mode)
    error = error_of_optimizer(built, early_param_gather="on", **settings)
    with installed(MuonConfig(preset="fast", **settings)):
        optimizer, printed = printed_by(lambda: make_optimizer(built))
    lines = [line for line in printed.splitlines() if "early_param_gather" in line]
    return error, _starts_early(optimizer), lines


def _starts_early(optimizer: Any) -> bool:
    return any(
        part.early_gathers is not None for part in distributed_optimizers(optimizer)
    )


@pytest.mark.parametrize(("settings", "mode", "error"), REFUSED.values(), ids=REFUSED)
def test_what_gathers_otherwise_is_refused_and_with_fast_they_are_off_and_a_line_says_so(
    settings: dict[str, Any], mode: tuple[str, Any], error: str
) -> None:
    named = "early_param_gather (--muon-early-param-gather)"
    (one, is_early, lines), (two, other, nothing) = run(_of_a_mode, 2, settings, mode)
    assert one.startswith(error.format(named)) and two.startswith(
        error.format(named)
    ), (one, two)
    assert not is_early and not other and nothing == []
    _, _, what = error.partition("{} with ")
    off = f"[megatron_muon] {named} is off with {what}"
    assert [line.startswith(off) for line in lines] == [True] * bool(what), lines


STEP_OVERLAP = replace(IN_STAGES, chunks=2, step_overlap=True)


def test_megatrons_own_early_gather_is_refused_with_it() -> None:
    case = Case(muon=EARLY, layers=4, steps=0)
    with pytest.raises(RankError, match="both start the first gather"):
        run(train, 4, case, STEP_OVERLAP)


def _made(case: Case, topology: Topology) -> bool:
    return _starts_early(start(case, topology).optimizer)


@pytest.mark.parametrize(
    ("case", "topology"),
    [(replace(FAST, layers=4), STEP_OVERLAP), (UNSET, IN_BUCKETS)],
    ids=["with Megatron's own early gather", "by default"],
)
def test_with_fast_or_by_default_they_are_off(case: Case, topology: Topology) -> None:
    assert (
        run(_made, topology.world_size, case, topology) == [False] * topology.world_size
    )
