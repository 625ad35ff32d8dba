"""The line that a run prints at its start, against what Megatron's buffers really hold."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import pytest
from gpt import Case, Topology, start
from ranks import run


def _start_line(case: Case, topology: Topology) -> dict[str, Any]:
    printed = io.StringIO()
    with redirect_stdout(printed):
        built = start(case, topology)
    shards_of: dict[str, set[int]] = {}  # Muon parameter -> shards of its bucket that hold some
    elements = {}
    for buffer in built.ddp.buffers:
        for name, param in built.params.items():
            if param.dim() == 2 and "embedding" not in name and "output" not in name:
                begin, end, bucket_id = buffer.param_index_map[param]
                bucket = buffer.buckets[bucket_id]
                size = bucket.grad_data.numel() // topology.dp
                places = range(begin - bucket.offset, end - bucket.offset)
                shards_of[name] = {place // size for place in places}
                elements[name] = param.numel()
    cut = [name for name, shards in shards_of.items() if len(shards) > 1]
    return {
        "printed": printed.getvalue(),
        "buckets": sum(len(buffer.buckets) for buffer in built.ddp.buffers),
        "boundary": len(cut),
        "bytes": 2 * sum(elements[name] for name in cut),  # they travel in bf16
        "parameters": len(shards_of),
        "first of its stage": built.tp_rank == built.dp_rank == 0,
    }


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_each_stage_says_its_buckets_and_boundary_parameters_once(overlap: bool) -> None:
    topology = Topology(tp=2, pp=2, dp=2, overlap=overlap)
    for rank in run(_start_line, topology.world_size, Case(layers=2), topology):
        lines = [x for x in rank["printed"].splitlines() if "[megatron_muon]" in x]
        assert len(lines) == int(rank["first of its stage"])
        for line in lines:
            assert f"in {rank['parameters']} parameters" in line
            assert f" {rank['buckets']} bucket(s), {rank['boundary']} boundary parameter(s)" in line
            assert f"({rank['bytes'] / 1000:.3g} kB per TP rank)" in line
    assert rank["boundary"] <= rank["buckets"] * (topology.dp - 1)
