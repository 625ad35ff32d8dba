"""``megatron-muon routes`` prints what a run does, without a GPU, a launcher or
memory.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.commands import main
from megatron_muon.lab.dry_run.presets import PRESETS
from megatron_muon.lab.routes.sentences import optimizer_text
from megatron_muon.mcore.host.process_groups import has_experts
from megatron_muon.planning.plan import ExchangePlan
from support.installed import lacks
from support.models.gpt import (
    Built,
    Case,
    Topology,
    distributed_optimizers,
    printed_by,
    start,
)
from support.models.model_flags import DEEPSEEK_V3, LLAMA_3_8B, TINY, flags_of
from support.processes import report_of, without_launcher
from support.ranks import run
from support.runs.topologies import (
    DP3_OVERLAP,
    DP4_INSTANCES2,
    ONE,
    TP2_CP2,
    TP2_DP2_EP2_ETP1,
    TP2_DP2_OVERLAP,
    TP2_PP2,
    TP2_PP2_DP2,
    TP4,
)


def built_by_a_run(case: Case, topology: Topology) -> dict[str, Any]:
    """On a rank of a real run: what its Muon parts plan, its other weights, and what it
    printed.
    """
    built, printed = printed_by(lambda: start(case, topology))
    plans = {}
    for dist_opt in distributed_optimizers(built.optimizer):
        plan = dist_opt.muon.plan
        matrices = iter(plan.matrices)
        for parameter in plan.parameters:
            own = itertools.islice(matrices, len(parameter.matrices))
            plans[parameter.name, parameter.ep_rank] = [
                (m.name, m.rows, m.cols, m.home) for m in own
            ]
    return {
        "stage": built.pp_rank,
        "first": built.place.ep_rank == 0,
        "plans": plans,
        "weights": {
            route.weight.name: (list(route.weight.param.shape), route.why_adamw)
            for route in dist_opt.routes
        },
        "printed": printed,
        "stage_line": stage_line(built),
    }


def stage_line(built: Built) -> str:
    """What ``routes`` says of the stage, from its real plans and buffers."""
    sentences: list[str] = []
    earlier: list[ExchangePlan] = []
    for dist_opt in distributed_optimizers(built.optimizer):
        buckets = [len(buffer.buckets) for buffer in dist_opt.buffers]
        plan = dist_opt.muon.plan
        sentences.append(
            optimizer_text(
                plan,
                experts=has_experts(dist_opt),
                buckets=buckets,
                earlier=earlier,
                rule=dist_opt.muon.config.rule,
            )
        )
        earlier = [*earlier, plan]
    return f"[megatron_muon] pipeline stage {built.pp_rank}: {'. '.join(sentences)}"


MOE = Case(moe=True, gated=True)
OWN = (("*.linear_fc1.*", "rows:120,400"), ("*.linear_proj.*", "heads:6"))
BY_PATTERN = ("*.0.*:ns_steps=9", "*.linear_qkv.weight[k]:ns_coefficients=quintic")
CASES = [
    (Case(), TP2_PP2_DP2),
    (Case(layers=4), DP3_OVERLAP),
    (
        Case(gated=True).with_muon(splits=OWN, by_pattern=BY_PATTERN),
        TP2_DP2_OVERLAP,
    ),
    (MOE, TP2_DP2_EP2_ETP1),
    (Case(layers=4), Topology.of("pp2 chunks2")),
    (Case(), DP4_INSTANCES2),
    (Case(mla="column", tied=True), TP2_PP2),
    (Case(), TP2_CP2),
    (Case(heads=8, groups=2, ffn=4), TP4),
]


@pytest.mark.parametrize("case, topology", CASES, ids=lambda value: str(value)[:40])
def test_what_is_printed_is_what_a_run_does(case: Case, topology: Topology) -> None:
    if reason := lacks(case, topology):
        pytest.skip(reason)
    muon = dict(case.muon)
    own = [f"--muon-split={'='.join(split)}" for split in muon.get("splits", ())]
    own += [f"--muon-for={text}" for text in muon.get("by_pattern", ())]
    routes = report_of(
        "routes", *flags_of(case, topology), *own, "--muon-dp-layout", "bucketed"
    )
    results = run(built_by_a_run, topology.world_size, case, topology)
    assert [stage["stage"] for stage in routes["stages"]] == list(range(topology.pp))
    for result in results:
        stage = routes["stages"][result["stage"]]
        planned = {
            (row["name"], row["ep_rank"] or 0): [
                (m["name"], m["rows"], m["cols"], m["home"]) for m in row["matrices"]
            ]
            for row in stage["parameters"]
            if row["optimizer"] == "muon"
        }
        assert planned == result["plans"]
        if result["first"]:  # weights are named as on the first EP rank
            shown = {
                row["name"]: (row["shape"], row["reason"])
                for row in stage["parameters"]
                if not row["ep_rank"]
            }
            assert shown == result["weights"]
    printed = "".join(result["printed"] for result in results)
    assert any("memory: a rank holds the momentum" in line for line in routes["lines"])
    for line in routes["lines"]:
        assert line.removeprefix("[megatron_muon] ") in printed
    for result in results:
        assert routes["stages"][result["stage"]]["lines"] == [result["stage_line"]]


def test_the_number_of_buckets_is_a_runs() -> None:
    """Of the model, as run through bucketing in test_bucket_count."""
    flags = [*LLAMA_3_8B, "--overlap-grad-reduce", "--world-size", "8"]
    routes = report_of("routes", *flags)
    assert " of 8 gradient bucket(s). " in routes["stages"][0]["lines"][0]
    assert any("about 8 buckets in place of 98" in note for note in routes["notes"])
    stock = report_of("routes", *flags, "--muon-dp-layout", "bucketed")
    assert " of 98 gradient bucket(s). " in stock["stages"][0]["lines"][0]


# --- as a program ---------------------------------------------------------------------


@pytest.mark.timeout(1200)  # seconds of the wall; an idle machine needs a fraction
def test_deepseek_v3_on_1024_ranks_needs_no_gpu_no_launcher_and_little(
    tmp_path: Path,
) -> None:
    """As a program by itself, with processor time and memory as the kernel counts
    them.
    """
    env = without_launcher(OMP_NUM_THREADS="1")
    words = "-m megatron_muon routes --json out.json".split()
    command = [sys.executable, *words, *DEEPSEEK_V3]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=env, cwd=tmp_path
        )
        _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, (tmp_path / "err").read_text()
    routes = json.loads((tmp_path / "out.json").read_text())
    assert usage.ru_utime + usage.ru_stime < 60, "seconds of one core, imports too"
    assert usage.ru_maxrss < 2e6, "KiB"
    names = {row["name"] for stage in routes["stages"] for row in stage["parameters"]}
    assert "decoder.layers.60.mlp.experts.local_experts.255.linear_fc2.weight" in names
    homes = [
        matrix["home"]
        for row in routes["stages"][1]["parameters"]
        if row["ep_rank"] is not None
        for matrix in row["matrices"]
    ]
    assert len(homes) == 4 * 256 * 2 and set(homes) == set(range(64))
    # arXiv 2412.19437
    assert "671 G" in routes["lines"][0] and "37.6 G" in routes["lines"][0]


# --- patterns and settings ------------------------------------------------------------


def test_hyperball_has_no_scale(capsys: pytest.CaptureFixture[str]) -> None:
    """Its radii are known once a run has taken a step."""
    flags = [*flags_of(Case(), ONE), "--muon-rule", "hyperball"]
    (stage,) = report_of("routes", *flags)["stages"]
    matrices = [one for row in stage["parameters"] for one in row["matrices"]]
    assert {one["scale"] for one in matrices} == {None}
    assert re.search(r"linear_fc1.* muon +- +", capsys.readouterr().out)


def test_rates_and_decays_by_pattern_are_shown() -> None:
    flags = "--muon-lr-mult *fc1.weight=0.5 --muon-wd-mult *.1.*fc?.weight=0".split()
    flags += ["--muon-lr-mult", "embedding.word*=2"]
    (stage,) = report_of("routes", *TINY, *flags)["stages"]
    factors = {
        row["name"]: (row["lr_mult"], row["wd_mult"]) for row in stage["parameters"]
    }
    assert {name: pair for name, pair in factors.items() if pair != (1, 1)} == {
        "embedding.word_embeddings.weight": (2, 1),
        "decoder.layers.0.mlp.linear_fc1.weight": (0.5, 1),
        "decoder.layers.1.mlp.linear_fc1.weight": (0.5, 0),
        "decoder.layers.1.mlp.linear_fc2.weight": (1, 0),
    }


def test_settings_by_pattern_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """With the names that patterns are compared with, and with their scale."""
    flags = ["--muon-for", "*.0.mlp.linear_fc1.weight:lr=1e-3,rms=0.4,ns_steps=8"]
    flags += ["--muon-for", "*.linear_qkv.weight[v]:momentum=0.9"]
    flags += ["--muon-for", "embedding.word*:weight_decay=0"]
    (stage,) = report_of("routes", *TINY, *flags)["stages"]
    fc1 = "decoder.layers.{}.mlp.linear_fc1.weight"
    qkv = "decoder.layers.{}.self_attention.linear_qkv.weight"
    found: dict[str, str] = {}
    scales: dict[str, Any] = {}
    for row in stage["parameters"]:
        found |= {row["name"]: row["settings"]} if row["settings"] else {}
        for matrix in row["matrices"]:
            scales[matrix["name"]] = matrix["scale"]
            if matrix["settings"]:
                found[f"matrix {matrix['name']}"] = matrix["settings"]
    assert found == {
        "embedding.word_embeddings.weight": "weight_decay=0.0",
        fc1.format(0): "lr=0.001",
        f"matrix {fc1.format(0)}": "rms=0.4,ns_steps=8",
        f"matrix {qkv.format(0)}[v]": "momentum=0.9",
        f"matrix {qkv.format(1)}[v]": "momentum=0.9",
    }
    assert scales[fc1.format(0)] == 2 * scales[fc1.format(1)]
    assert main(["routes", *TINY, *flags]) == 0
    text = capsys.readouterr().out
    assert "muon lr=0.001 rms=0.4,ns_steps=8" in text
    assert "muon [v]:momentum=0.9" in text


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_read_by_its_name_and_changed_by_flags(name: str) -> None:
    """Small enough to build in a moment; ``test_dry_run.py`` holds presets to
    Megatron-LM's own.
    """
    small = "--num-layers 4 --dp 2 --moe-layer-freq 1".split()
    routes = report_of("routes", "--model", name, *small)
    assert routes["ranks"]["world"] == 2 and len(routes["stages"]) == 1
    layers = {
        row["name"].split(".")[2] for row in routes["stages"][0]["parameters"][1:-2]
    }
    assert layers == {"0", "1", "2", "3"}
