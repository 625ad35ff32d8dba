"""Times, bytes and shares of hand-made traces, whose answers are known."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.traces.intervals import Union, common, length, union
from megatron_muon.lab.traces.lanes import lanes
from megatron_muon.lab.traces.measure import KindTimes, RankTimes
from megatron_muon.lab.traces.rank_trace import read
from megatron_muon.lab.traces.runs import run_times
from support.traces import HOST, Event, event, gloo, kernel, mark, nccl, write

STEP = mark("ProfilerStep#3", 0, 1000)


def _times(tmp_path: Path, *events: Event, **metadata: Any) -> RankTimes:
    (rank,) = run_times(write(tmp_path / "t.json.gz", events, **metadata), "t").ranks
    return rank


def _split(rank: RankTimes) -> tuple[float, ...]:
    """compute, communication, overlapped, exposed, idle; in microseconds."""
    fields = ("compute", "communication", "overlapped", "exposed", "idle")
    return tuple(round(1e3 * getattr(rank, f"{field}_ms"), 6) for field in fields)


def _kind(rank: RankTimes, name: str) -> KindTimes:
    return {kind.name: kind for kind in rank.kinds}[name]


# --- intervals --------------------------------------------------------------------------------


def test_unions_and_intersections_are_those_of_sets_of_moments() -> None:
    draw = random.Random(1)
    for _ in range(50):
        cuts = [sorted(draw.choices(range(60), k=2)) for _ in range(draw.randint(0, 12))]
        others = [sorted(draw.choices(range(60), k=2)) for _ in range(draw.randint(0, 12))]
        one, two = ({t for a, b in own for t in range(a, b)} for own in (cuts, others))
        left, right = (union((a, b) for a, b in own) for own in (cuts, others))
        assert length(left) == len(one) and length(common(left, right)) == len(one & two)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(left))


def test_a_union_merges_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_muon.lab.traces.intervals._BATCH", 8)
    whole = Union()
    for at in random.Random(2).sample(range(1000), 1000):
        whole.add(at, at + 1)
        assert len(whole._late) <= max(8, len(whole._starts) / 4)
    assert list(whole) == [(0, 1000)]


# --- on a CPU ---------------------------------------------------------------------------------


def test_a_cpus_step_is_compute_exposed_and_idle(tmp_path: Path) -> None:
    rank = _times(
        tmp_path,
        STEP,
        event("aten::linear", 100, 300),
        event("aten::mm", 150, 250),  # nested: counts once
        event("aten::add", 500, 600),
        gloo("all_reduce", 250, 550),
        event("LinearBackward", 0, 900),  # a wrapper, which holds waits too
        event("autograd::engine::evaluate_function: X", 0, 900),
    )
    assert (rank.device, rank.steps, rank.step_ms) == ("cpu", 1, 1.0)
    assert _split(rank) == (300, 300, 100, 200, 500)


def test_operators_of_other_threads_compute_too(tmp_path: Path) -> None:
    rank = _times(tmp_path, STEP, event("aten::mm", 0, 100), event("aten::mm", 50, 250, tid=5))
    assert _split(rank) == (250, 0, 0, 0, 750)


def test_what_is_outside_the_steps_does_not_count_and_figures_are_means(tmp_path: Path) -> None:
    rank = _times(
        tmp_path,
        mark("ProfilerStep#3", 1000, 2000),
        mark("ProfilerStep#4", 3000, 5000),
        event("aten::mm", 0, 1100),  # 100 inside
        event("aten::mm", 1900, 3100),  # 200 inside
        gloo("all_reduce", 2100, 2900, 10),
        gloo("all_reduce", 4000, 4400, 10),
    )
    assert (rank.steps, rank.step_ms) == (2, 1.5)
    assert _split(rank) == (150, 200, 0, 200, 1150)
    assert _kind(rank, "all_reduce fp32").count == 0.5


def test_a_kind_is_exposed_where_nothing_is_computed(tmp_path: Path) -> None:
    rank = _times(
        tmp_path,
        mark("ProfilerStep#3", 1000, 2000),
        mark("ProfilerStep#4", 3000, 5000),
        event("aten::mm", 1200, 1500),
        gloo("all_reduce", 1100, 1600, 10),
        gloo("broadcast", 1400, 1700, 10),  # both are exposed from 1500 to 1600
        gloo("all_reduce", 4900, 5100, 10),  # the last 100 are after the step
    )
    assert _kind(rank, "all_reduce fp32").exposed_ms == pytest.approx((100 + 100 + 100) / 2e3)
    assert _kind(rank, "broadcast fp32").exposed_ms == pytest.approx(200 / 2e3)
    assert rank.exposed_ms == pytest.approx((100 + 200 + 100) / 2e3)


def test_without_marks_the_whole_trace_is_one_step(tmp_path: Path) -> None:
    rank = _times(tmp_path, event("aten::mm", 500, 600), gloo("send", 700, 1000))
    assert (rank.steps, rank.step_ms, rank.optimizer_ms) == (0, 0.5, None)
    assert _split(rank) == (100, 300, 0, 300, 100)


GLOO = {  # operator, shapes and types of its arguments, gloo's event, elements: what it is
    "all-reduce": (
        "allreduce_",
        [[[250]]],
        ["TensorList"],
        "all_reduce",
        250,
        ("all_reduce", 1000),
    ),
    "reduce-scatter": (
        *("_reduce_scatter_base_", [[50], [100]], ["float", "float"], "all_reduce", 100),
        ("reduce_scatter", 400),
    ),
    "coalesced": (
        *("reduce_scatter_tensor_coalesced_", [[[50]], [[100]]], ["TensorList"] * 2),
        *("all_reduce", 100, ("reduce_scatter", 400)),
    ),
    "all-gather": (
        *("_allgather_base_", [[100], [25]], ["float", "float"], "all_gather", 25),
        ("all_gather", 400),
    ),
    "send": ("send", [[[8, 2]]], ["TensorList"], "send", 16, ("send", 64)),
    "recv": ("recv_", [[[8, 2]]], ["TensorList"], "recv", 16, ("recv", 64)),
    "broadcast": ("broadcast_", [[[16]]], ["TensorList"], "broadcast", 16, ("broadcast", 64)),
}


@pytest.mark.parametrize("which", GLOO)
def test_gloos_event_is_of_the_operator_that_started_it(which: str, tmp_path: Path) -> None:
    operator, dims, types, backends, elements, (said, size) = GLOO[which]
    rank = _times(
        tmp_path,
        STEP,
        mark("muon/gather", 90, 120),
        mark("muon/gather/collective", 95, 115),
        event(f"c10d::{operator}", 100, 110, args={"Input Dims": dims, "Input type": types}),
        gloo(backends, 105, 305, elements),
    )
    (kind,) = rank.kinds
    assert (kind.operation, kind.dtype, kind.place) == (said, "fp32", "muon/gather")
    assert (kind.count, round(kind.ms, 6), kind.bytes) == (1, 0.2, size)
    assert kind.gbytes == pytest.approx(size / 200e-6 / 1e9)


def test_collectives_that_wait_in_line_are_matched_in_order(tmp_path: Path) -> None:
    sizes = {"Input type": ["float", "float"]}
    rank = _times(
        tmp_path,
        STEP,
        gloo("all_reduce", 5, 50, 3),  # from before the trace
        mark("grads/reduce", 10, 40),
        event("c10d::_reduce_scatter_base_", 20, 30, args={"Input Dims": [[4], [8]], **sizes}),
        event("c10d::allreduce_", 60, 70, args={"Input Dims": [[[5]]]}),
        gloo("all_reduce", 55, 100, 8),
        gloo("all_reduce", 100, 200, 5),
    )
    bytes_by_kind = {kind.name: kind.bytes for kind in rank.kinds}
    assert bytes_by_kind == {
        "all_reduce fp32": (3 + 5) * 4,
        "reduce_scatter fp32 grads/reduce": 32,
    }
    assert _kind(rank, "reduce_scatter fp32 grads/reduce").bus_gbytes == pytest.approx(
        32 / 45e-6 / 1e9 / 2  # two ranks: half of it is sent
    )


def test_without_recorded_shapes_bytes_are_unknown(tmp_path: Path) -> None:
    (kind,) = _times(tmp_path, STEP, gloo("all_reduce", 0, 10)).kinds
    assert (kind.bytes, kind.gbytes, kind.bus_gbytes) == (None, None, None)


def test_without_gloos_events_the_operators_on_the_host_are_the_collectives(tmp_path: Path) -> None:
    rank = _times(tmp_path, STEP, event("c10d::allreduce_", 0, 100), event("aten::mm", 50, 150))
    assert _split(rank) == (100, 100, 50, 50, 850)


# --- on a GPU ---------------------------------------------------------------------------------


def test_streams_of_a_gpu_overlap(tmp_path: Path) -> None:
    rank = _times(
        tmp_path,
        STEP,
        event("aten::mm", 0, 900),  # the host's time does not count
        kernel("void gemm<float>(int)", 100, 300),
        kernel("void gemm<float>(int)", 200, 400, stream=13),
        event("Memcpy HtoD", 400, 450, "gpu_memcpy", pid=0, tid=7),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", 350, 650, stream=20),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", 600, 700, stream=24),
    )
    assert rank.device == "gpu"
    assert _split(rank) == (350, 350, 100, 250, 400)


KERNELS = {
    "ncclDevKernel_AllGather_RING_LL(ncclDevComm*)": "all_gather",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x<4096ul>)": "reduce_scatter",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": "all_reduce",
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": "all_reduce",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)": "send_recv",
    "ncclDevKernel_Broadcast_RING_LL(ncclDevComm*)": "broadcast",
    "ncclDevKernel_Generic(ncclDevComm*)": "nccl",
}


@pytest.mark.parametrize("name", KERNELS)
def test_nccls_kernels_are_known_by_name(name: str, tmp_path: Path) -> None:
    (kind,) = _times(tmp_path, STEP, kernel(name, 0, 10)).kinds
    assert (kind.operation, kind.bytes) == (KERNELS[name], None)


NCCL = {  # collective, elements, ranks, dtype: operation, dtype, bytes, bytes on the bus
    "all-gather": (("_allgather_base", 1000, 4, "BFloat16"), ("all_gather", "bf16", 2000, 1500)),
    "reduce-scatter": (
        ("_reduce_scatter_base", 1000, 8, "Float"),
        ("reduce_scatter", "fp32", 4000, 3500),
    ),
    "all-reduce": (("allreduce", 1000, 4, "Half"), ("all_reduce", "fp16", 2000, 3000)),
    "all-to-all": (("all_to_allv", 1000, 4, "Byte"), ("all_to_all", "uint8", 1000, 750)),
    "send": (("send", 1000, 2, "Long"), ("send", "int64", 8000, 8000)),
}


@pytest.mark.parametrize("which", NCCL)
def test_nccls_arguments_give_bytes_and_bandwidth(which: str, tmp_path: Path) -> None:
    (collective, elements, ranks, dtype), (said, short, size, sent) = NCCL[which]
    args = nccl(collective, elements, ranks, dtype)
    (kind,) = _times(tmp_path, STEP, kernel("ncclDevKernel_Generic(x)", 0, 50, **args)).kinds
    assert (kind.operation, kind.dtype, kind.bytes) == (said, short, size)
    assert kind.gbytes == pytest.approx(size / 50e-6 / 1e9)
    assert kind.bus_gbytes == pytest.approx(sent / 50e-6 / 1e9)


def test_an_nccl_kernel_is_in_the_phase_that_launched_it(tmp_path: Path) -> None:
    ours = nccl("_allgather_base", 10, 2, "Float") | {"External id": 5}
    rank = _times(
        tmp_path,
        STEP,
        mark("params/gather", 10, 40),
        event("record_param_comms", 20, 30, args=ours),
        kernel("ncclDevKernel_AllGather_RING_LL(x)", 500, 600, **{"External id": 5}),
        kernel(
            "ncclDevKernel_AllGather_RING_LL(x)",
            *(700, 800),
            **nccl("_allgather_base", 6, 2, "Float"),
            **{"External id": 6, "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP"},
        ),
    )
    assert {kind.name: kind.bytes for kind in rank.kinds} == {
        "all_gather fp32 params/gather": 40,
        "all_gather fp32 TENSOR_MODEL_PARALLEL_GROUP": 24,
    }


def test_an_operator_with_sizes_tells_them_of_a_kernel_without(tmp_path: Path) -> None:
    """As torch before 2.2 writes them; the operator's number is also that of what it calls."""
    told = nccl("allreduce", 10, 4, "Half") | {"External id": 5}
    rank = _times(
        tmp_path,
        STEP,
        event("record_param_comms", 20, 30, args=told),
        event("c10d::allreduce_", 10, 40, args={"External id": 5}),
        kernel("ncclKernel_AllReduce_RING_LL_Sum_half(x)", 500, 600, **{"External id": 5}),
    )
    (kind,) = rank.kinds
    assert (kind.name, kind.bytes) == ("all_reduce fp16", 20)
    assert kind.bus_gbytes == pytest.approx(30 / 100e-6 / 1e9)


def test_a_collectives_place_is_the_innermost_annotation_of_its_thread(tmp_path: Path) -> None:
    rank = _times(
        tmp_path,
        STEP,
        mark("layer", 0, 900),
        mark("before", 100, 200),
        mark("attention", 300, 800),
        mark("softmax", 350, 380),
        mark("elsewhere", 300, 800) | {"tid": 5},
        event("c10d::allreduce_", 400, 410),
        gloo("all_reduce", 405, 500),
        event("c10d::send", 850, 860),
        gloo("send", 855, 990),
    )
    assert [(kind.operation, kind.place) for kind in rank.kinds] == [
        ("send", "layer"),
        ("all_reduce", "attention"),
    ]


def test_kernels_after_the_hosts_last_step_are_in_it(tmp_path: Path) -> None:
    events = (mark("ProfilerStep#1", 0, 100), kernel("gemm", 50, 400))
    assert _times(tmp_path, *events).step_ms == 0.4
    # our own traces wait for the GPU within a step, and meet other ranks after the last one
    assert _times(tmp_path, *events, megatron_muon={"stage": 0}).step_ms == 0.1


# --- the optimizer ----------------------------------------------------------------------------

MARKS = [
    mark("Optimizer.step#FusedAdam.step", 100, 200),
    mark("muon/update", 150, 300),
    mark("params/gather/wait", 400, 450),
    mark("forward", 0, 900),
]


def test_the_optimizers_share_is_its_own_mark_else_that_of_its_parts(tmp_path: Path) -> None:
    assert _times(tmp_path, STEP, *MARKS).optimizer_ms == pytest.approx(0.25)
    whole = mark("optimizer/step", 90, 490)
    assert _times(tmp_path, STEP, *MARKS, whole).optimizer_ms == pytest.approx(0.4)


def test_on_a_gpu_the_optimizers_share_is_on_the_gpu(tmp_path: Path) -> None:
    there = event("optimizer/step", 600, 700, "gpu_user_annotation", pid=0)
    rank = _times(tmp_path, STEP, *MARKS, there, kernel("gemm", 600, 700))
    assert rank.optimizer_ms == pytest.approx(0.1)


# --- a picture --------------------------------------------------------------------------------


def test_the_lanes_of_a_step_begin_with_it_and_keep_its_gaps(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.json",
        [
            mark("ProfilerStep#1", 0, 1000),
            mark("ProfilerStep#2", 2000, 4000),
            event("aten::mm", 500, 2500),
            event("aten::mm", 2500.5, 3000),  # too small a gap to see
            mark("muon/newton_schulz", 2200, 2400),
            mark("muon/gather/wait", 2200, 2400),
            event("c10d::send", 2100, 2150, tid=HOST),
            gloo("send", 2110, 3110),
        ],
    )
    by_name = {lane.name: lane for lane in lanes(read(path))}
    assert list(by_name) == ["compute", "optimizer", "muon/newton_schulz", "send"]
    assert by_name["compute"].spans == ((0.0, pytest.approx(1.0)),)
    assert by_name["send"].spans == ((pytest.approx(0.11), pytest.approx(1.0)),)
    assert by_name["send"].is_traffic and not by_name["compute"].is_traffic
