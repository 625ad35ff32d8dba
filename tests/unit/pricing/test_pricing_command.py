"""``megatron-muon bench price``: a stage of any size from Megatron's flags, in seconds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatron_muon.bench.price.command import priced_of
from megatron_muon.cli import main
from megatron_muon.pricing.presets import H100
from support.models.model_flags import LLAMA_3_8B
from support.models.model_flags import TINY as TINY_WORDS

TINY = " ".join(TINY_WORDS)
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"


def test_every_row_and_every_assumption_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "price.json"
    words = f"bench price {TINY} --world-size 4 --set launch_us=9 --json {file}"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    for row in ("AdamW", "ours, standard, torch's products", "ours, auto, symmetric kernel"):
        assert row in printed
    assert "launch_us 9 us (--set)" in printed
    assert all(line in printed for line in H100.lines() if not line.startswith("launch_us"))
    written = json.loads(file.read_text())
    assert written["hardware"]["constants"]["launch_us"]["value"] == 9
    (stage,) = written["stages"]
    assert stage["ranks"] == 4 and len(stage["ours"]) == 4
    assert 0 < stage["adamw"] < stage["ours"][0]["step"]["seconds"]


def test_512_ranks_are_priced_in_seconds() -> None:
    words = f"{' '.join(LLAMA_3_8B)} {OVERLAP} --tensor-model-parallel-size 8 --world-size 512"
    start = time.process_time()
    (stage,), _ = priced_of(words.split(), H100)
    assert time.process_time() - start < 60  # most of it makes the model and its plans
    assert stage.ranks == 512


def test_elements_of_adamw_are_those_that_muon_does_not_own() -> None:
    from megatron_muon.bench.price.command import _parser
    from megatron_muon.bench.price.stages import rest_of
    from megatron_muon.cli.model_flags import (
        imported_config_class,
        megatron_is_quiet,
        muon_settings,
    )
    from megatron_muon.dry_run.model import ranks_of
    from megatron_muon.dry_run.stages import planned_stage
    from megatron_muon.pricing.work import held_elements

    words = f"{TINY} --world-size 4 --tensor-model-parallel-size 2"
    flags = _parser(imported_config_class("a test")).parse_args(words.split())
    with megatron_is_quiet():
        ranks = ranks_of(flags)
        (planned,) = planned_stage(flags, muon_settings(flags), ranks, 0)
    all_elements = sum(
        stop - start
        for buffer in planned.buffers
        for start, stop, _ in buffer.param_index_map.values()
    )
    assert sum(rest_of(planned)) + sum(held_elements(planned.plan)) == all_elements * ranks.tp


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("--hardware tpu", "--hardware tpu: neither a file nor one of h100"),
        ("--set speed=1", "--set speed=1: give NAME=VALUE"),
        ("--set launch_us=fast", "'fast' is not a number"),
        ("--set memory_gbytes=-1", "memory_gbytes must be above 0"),
        ("--stage 3", "--stage 3: the last pipeline stage is 0"),
        ("--json /nowhere/price.json", "--json /nowhere/price.json: there is no folder"),
    ],
)
def test_wrong_arguments_are_named(
    more: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(f"bench price {TINY} --world-size 4 {more}".split())
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
