"""Traces: what is read of a file, what is refused, and a step's times."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from megatron_muon.lab.trace import events
from megatron_muon.lab.trace.events import TraceError, files_of, read_trace
from megatron_muon.lab.trace.rank_trace import RankTrace
from megatron_muon.lab.trace.runs import read_run
from support.traces import Event, event, gloo, kernel, mark, nccl, write

STEP = mark("ProfilerStep#3", 0, 1000)
EVENTS: list[dict[str, Any]] = [
    {"name": 'a "quoted" name, with ] and } and \\', "args": {"list": [1, [2, {}]]}},
    {},
    {"name": "", "ts": 1.5, "n": None, "nested": {"a": {"b": [True, False]}}},
]


def _written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "t.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_an_object_a_list_and_gzip_are_the_same_events(tmp_path: Path) -> None:
    before = {"schemaVersion": 1, "é": ["ü", 12]}
    after = {"distributedInfo": {"rank": 3}}
    whole = json.dumps(
        {**before, "traceEvents": EVENTS, **after}, ensure_ascii=False, indent=1
    )
    for text in (f"\n {whole} \n", gzip.compress(whole.encode())):
        assert read_trace(_written(tmp_path, text)) == (EVENTS, 3)
    assert read_trace(_written(tmp_path, json.dumps(EVENTS))) == (EVENTS, None)


GZIPPED = gzip.compress(json.dumps({"traceEvents": EVENTS * 50}).encode())
DAMAGED: dict[str, tuple[str | bytes, str]] = {
    "text": ("hello", "it is no trace"),
    "no list": ('{"traceEvents": {}}', "it has no traceEvents"),
    "cut": ('{"traceEvents": [{"name": "a"}, {"na', "it is no trace"),
    "number": ("[1, 2]", "event 0: it is no object but '1'"),
    "NaN": ('[{"name": "a", "ts": NaN}]', "NaN is no number of JSON"),
    "deep": ('[{"a":' + "[" * 200_000, "it is nested too deeply"),
    "cut gzip": (GZIPPED[:-20], "it is no trace"),
}


@pytest.mark.parametrize("which", DAMAGED)
def test_what_is_wrong_is_one_error_that_names_the_file(
    which: str, tmp_path: Path
) -> None:
    text, said = DAMAGED[which]
    path = _written(tmp_path, text)
    with pytest.raises(
        TraceError, match=f"^{re.escape(str(path))}: .*{re.escape(said)}"
    ) as caught:
        RankTrace(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_pipe_a_folder_or_a_file_beyond_all_bounds_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "missing"):
        with pytest.raises(TraceError, match=str(path)):
            RankTrace(path)
    monkeypatch.setattr(events, "MOST", 10_000)
    for packed in (gzip.compress, bytes):
        text = json.dumps([{"name": "a" * 50_000}]).encode()
        with pytest.raises(TraceError, match="trace fewer steps"):
            read_trace(_written(tmp_path, packed(text)))


@pytest.mark.parametrize("empty", ["{}", "[]"])
def test_events_are_counted_before_they_take_memory(
    empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty ones take 24 times the memory of their text, which a small file can
    hold.
    """
    monkeypatch.setattr(events, "MOST_PARTS", 1000)
    monkeypatch.setattr(events, "parsed", lambda text: pytest.fail("it was parsed"))
    text = f"[{','.join([empty] * 1000)}]".encode()
    with pytest.raises(
        TraceError, match="more than 1,000 events and lists: trace fewer steps"
    ):
        read_trace(_written(tmp_path, gzip.compress(text)))


def test_a_trace_that_memory_does_not_hold_is_an_error_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed(text: str) -> None:
        raise MemoryError

    monkeypatch.setattr(events, "parsed", parsed)
    path = _written(tmp_path, gzip.compress(b"[{}]"))
    with pytest.raises(TraceError, match=f"{path.name}: it takes more memory than"):
        read_trace(path)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no time": ({"ts": None}, "ts is 'None'"),
    "beyond floats": ({"ts": 1e300}, r"ts is '1e\+300"),
    "negative": ({"dur": -1}, "dur is '-1'"),
    "args": ({"args": [1]}, r".*args is '\[1\]'"),
    "20 sizes of 2^61": (
        {"name": "c10d::send", "args": {"Input Dims": [[1 << 61] * 20]}},
        "inf is no number of elements",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_value_is_an_error_with_the_file_and_the_event(
    which: str, tmp_path: Path
) -> None:
    change, said = WRONG[which]
    path = write(
        tmp_path / "t.json", [STEP, {"ph": "M"}, event("aten::mm", 0, 1) | change]
    )
    with pytest.raises(TraceError, match=f"^{re.escape(str(path))}: .*event 2: {said}"):
        RankTrace(path)


def test_ranks_are_known_by_the_trace_else_by_the_files_order(tmp_path: Path) -> None:
    for told in (None, "0", -1, [1], True, 1 << 80):
        path = write(tmp_path / "a.json", [STEP], distributedInfo={"rank": told})
        assert list(read_run(path, "x").ranks.index) == [0]
    write(tmp_path / "b.json.gz", [STEP], distributedInfo={"rank": 2})
    assert list(read_run(tmp_path, "x").ranks.index) == [0, 2]
    write(tmp_path / "c.json", [STEP], distributedInfo={"rank": 2})
    with pytest.raises(TraceError, match=r"c.json: b.json.gz is of rank 2, too"):
        read_run(tmp_path, "x")


def test_a_trace_of_no_rank_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no event in it has a duration"):
        RankTrace(write(tmp_path / "t.json", [{"ph": "M", "name": "process_name"}]))
    (tmp_path / "none").mkdir()
    with pytest.raises(
        TraceError, match=r"no file in it that ends in .json or .json.gz"
    ):
        files_of(tmp_path / "none")


STEPS = [mark("ProfilerStep#3", 1000, 2000), mark("ProfilerStep#4", 3000, 5000)]


def _times(
    tmp_path: Path, *events: Event, **metadata: Any
) -> tuple[pd.Series, pd.DataFrame]:
    """The row of the rank, and its collectives by name."""
    run = read_run(write(tmp_path / "t.json.gz", events, **metadata), "t")
    return run.ranks.iloc[0], run.kinds


GEMM, RING = "void gemm<float>(int)", "ncclDevKernel_AllGather_RING_LL(ncclDevComm*)"
SPLIT: dict[str, tuple[list[Event], tuple[int, ...]]] = {
    # compute, communication, exposed, idle in microseconds of a step
    "a CPU": (
        [
            STEP,
            event("aten::linear", 100, 300),
            event("aten::mm", 150, 250),  # nested: counts once
            event("aten::add", 500, 600),
            gloo("all_reduce", 250, 550),
            event("LinearBackward", 0, 900),  # a wrapper, which holds waits too
            event("autograd::engine::evaluate_function: X", 0, 900),
        ],
        (300, 300, 200, 500),
    ),
    "operators of other threads": (
        [STEP, event("aten::mm", 0, 100), event("aten::mm", 50, 250, tid=5)],
        (250, 0, 0, 750),
    ),
    "the mean of two steps, without what is outside": (
        [
            *STEPS,
            event("aten::mm", 0, 1100),
            event("aten::mm", 1900, 3100),
            gloo("all_reduce", 2100, 2900, 10),
            gloo("all_reduce", 4000, 4400, 10),
        ],
        (150, 200, 200, 1150),
    ),
    "no marks: the whole trace": (
        [event("aten::mm", 500, 600), gloo("send", 700, 1000)],
        (100, 300, 300, 100),
    ),
    "streams of a GPU": (
        [
            STEP,
            event("aten::mm", 0, 900),  # the host's time does not count
            kernel(GEMM, 100, 300),
            kernel(GEMM, 200, 400, stream=13),
            event("Memcpy HtoD", 400, 450, "gpu_memcpy", pid=0, tid=7),
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 350, 650, stream=20),
            kernel(RING, 600, 700, stream=24),
        ],
        (350, 350, 250, 400),
    ),
}


@pytest.mark.parametrize("which", SPLIT)
def test_a_step_is_compute_exposed_and_idle(which: str, tmp_path: Path) -> None:
    events, split = SPLIT[which]
    rank, _ = _times(tmp_path, *events)
    names = ("compute", "communication", "exposed", "idle")
    assert [rank[f"{name}_ms"] for name in names] == pytest.approx(
        [us / 1e3 for us in split]
    )
    assert rank.step_ms == pytest.approx(
        rank.compute_ms + rank.exposed_ms + rank.idle_ms
    )
    assert rank.device == ("gpu" if "GPU" in which else "cpu")
    assert rank.steps == {"the m": 2, "no ma": 0}.get(which[:5], 1)


def test_a_kind_is_exposed_where_nothing_is_computed(tmp_path: Path) -> None:
    rank, kinds = _times(
        tmp_path,
        *(*STEPS, event("aten::mm", 1200, 1500), gloo("all_reduce", 1100, 1600, 10)),
        gloo("broadcast", 1400, 1700, 10),  # both are exposed from 1500 to 1600
        gloo("all_reduce", 4900, 5100, 10),  # the last 100 are after the step
    )
    assert kinds.exposed_ms.to_dict() == pytest.approx(
        {"all_reduce fp32": 300 / 2e3, "broadcast fp32": 200 / 2e3}
    )
    assert kinds["count"].to_dict() == {"all_reduce fp32": 1, "broadcast fp32": 0.5}
    assert rank.exposed_ms == pytest.approx(400 / 2e3)


LIST, TWO = ["TensorList"], ["float", "float"]
# operator, shapes and types of its arguments, gloo's event, elements: operation, bytes
GLOO = [
    ("allreduce_", [[[250]]], LIST, "all_reduce", 250, "all_reduce", 1000),
    (
        "_reduce_scatter_base_",
        [[50], [100]],
        TWO,
        "all_reduce",
        100,
        "reduce_scatter",
        400,
    ),
    (
        "reduce_scatter_tensor_coalesced_",
        [[[50]], [[100]]],
        LIST * 2,
        "all_reduce",
        100,
        "reduce_scatter",
        400,
    ),
    ("_allgather_base_", [[100], [25]], TWO, "all_gather", 25, "all_gather", 400),
    ("recv_", [[[8, 2]]], LIST, "recv", 16, "recv", 64),
]


@pytest.mark.parametrize(
    ("operator", "dims", "types", "name", "elements", "said", "size"), GLOO
)
def test_gloos_event_is_of_the_operator_that_started_it(
    *,
    operator: str,
    dims: list[Any],
    types: list[str],
    name: str,
    elements: int,
    said: str,
    size: int,
    tmp_path: Path,
) -> None:
    _, kinds = _times(
        tmp_path,
        *(STEP, mark("muon/gather", 90, 120), mark("muon/gather/collective", 95, 115)),
        event(
            f"c10d::{operator}",
            100,
            110,
            args={"Input Dims": dims, "Input type": types},
        ),
        gloo(name, 105, 305, elements),
    )
    kind = kinds.loc[f"{said} fp32 muon/gather"]
    assert (kind["count"], round(kind.ms, 6), kind.bytes) == (1, 0.2, size)
    assert kind["GB/s"] == pytest.approx(size / 200e-6 / 1e9)


NCCL = {  # collective, elements, ranks, dtype: name, bytes
    ("_allgather_base", 1000, 4, "BFloat16"): ("all_gather bf16", 2000),
    ("_reduce_scatter_base", 1000, 8, "Float"): ("reduce_scatter fp32", 4000),
    ("allreduce", 1000, 4, "Half"): ("all_reduce fp16", 2000),
    ("all_to_allv", 1000, 4, "Byte"): ("all_to_all uint8", 1000),
    ("send", 1000, 2, "Long"): ("send int64", 8000),
}


@pytest.mark.parametrize("which", NCCL)
def test_nccls_arguments_give_bytes_and_bandwidth(
    which: tuple[str, int, int, str], tmp_path: Path
) -> None:
    name, size = NCCL[which]
    _, kinds = _times(
        tmp_path, STEP, kernel("ncclDevKernel_Generic(x)", 0, 50, **nccl(*which))
    )
    assert kinds.bytes[name] == size
    assert kinds["GB/s"][name] == pytest.approx(size / 50e-6 / 1e9)


def test_an_nccl_kernel_is_in_the_phase_that_launched_it(tmp_path: Path) -> None:
    ours = nccl("_allgather_base", 10, 2, "Float") | {"External id": 5}
    foreign = nccl("_allgather_base", 6, 2, "Float")
    foreign |= {
        "External id": 6,
        "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP",
    }
    _, kinds = _times(
        tmp_path,
        *(
            STEP,
            mark("params/gather", 10, 40),
            event("record_param_comms", 20, 30, args=ours),
        ),
        *(kernel(RING, 500, 600, **ours), kernel(RING, 700, 800, **foreign)),
    )
    assert kinds.bytes.to_dict() == {
        "all_gather fp32 params/gather": 40,
        "all_gather fp32 TENSOR_MODEL_PARALLEL_GROUP": 24,
    }


def test_kernels_after_the_hosts_last_step_are_in_it(tmp_path: Path) -> None:
    events = (mark("ProfilerStep#1", 0, 100), kernel("gemm", 50, 400))
    assert _times(tmp_path, *events)[0].step_ms == 0.4


def test_the_optimizer_of_a_gpu_is_where_its_kernels_run(tmp_path: Path) -> None:
    host = (STEP, mark("optimizer/step", 100, 150))
    assert _times(tmp_path, *host, event("aten::mm", 0, 9))[0].optimizer_ms == 0.05
    kernels = event("optimizer/step", 300, 700, "gpu_user_annotation")
    rank, _ = _times(tmp_path, *host, kernel(GEMM, 300, 700), kernels)
    assert rank.optimizer_ms == 0.4
