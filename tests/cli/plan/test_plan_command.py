"""``megatron-muon plan``: what a run costs, from Megatron's flags, and at other values
of them.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.commands import main
from megatron_muon.lab.plan.command import command_line
from megatron_muon.lab.plan.report import as_text
from megatron_muon.lab.plan.request import Request
from megatron_muon.lab.plan.rows import NAMES, TITLES
from megatron_muon.lab.plan.run import RunPlan, plan_run
from megatron_muon.lab.plan.variants import changes, explained
from megatron_muon.lab.pricing.presets import H100
from megatron_muon.lab.routes.model_flags import megatron_is_quiet
from support.benching import environment
from support.models.model_flags import LLAMA_3_8B
from support.models.model_flags import TINY as TINY_WORDS
from support.processes import report_of

TINY = " ".join(TINY_WORDS)
TP = "--tensor-model-parallel-size"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"


def asked(words: str) -> Request:
    return Request.of(command_line(words.split()))


def planned(words: str, **options: Any) -> RunPlan:
    return plan_run(asked(words), **options)


def test_every_algorithm_and_every_assumption_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    words = (
        f"plan {TINY} {TP} 2 --world-size 4 --set launch_us=9 --mfu 0.3 --json {file}"
    )
    assert main(words.split()) == 0
    short = capsys.readouterr().out
    assert all(title in short for title in TITLES.values()) and "launch_us" not in short
    assert main([*words.split(), "--assumptions"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == short.splitlines()[-1]
    assert "launch_us 9 us (--set)" in printed and "0.3 (--mfu)" in printed
    assert all(
        line in printed for line in H100.lines() if not line.startswith("launch_us")
    )
    written = json.loads(file.read_text())
    assert written["hardware"]["constants"]["launch_us"]["value"] == 9
    (stage,) = written["stages"]
    assert [row["name"] for row in stage["rows"]] == list(NAMES)
    assert set(written["step"]) == set(NAMES)
    adamw, muon = (written["step"][name] for name in ("adamw", "contiguous"))
    assert 0 < adamw["seconds"] < muon["seconds"]
    more = f"{1e3 * (muon['seconds'] - adamw['seconds']):+,.1f} ms a step"
    rows = [sum(row["rest"].values()) + (row["peak"] or 0) for row in stage["rows"][:2]]
    peak = (rows[1] - rows[0]) / (1 << 20)
    assert short.splitlines()[-1] == (
        f"Muon: {more}, {muon['slower_than_adamw']:+.2%} of a training step, ".replace(
            "%", " %"
        )
        + f"{abs(peak):,.0f} MiB {'less' if peak < 0 else 'more'} at the peak"
    )


STATES = ("main parameters", "Muon's momentum", "AdamW's moments")


def muon_row(words: str) -> Any:
    """The row ``contiguous`` of the small model on four ranks."""
    return planned(f"{TINY} --world-size 4 {words}").kinds[0].rows[1]


def test_states_in_fewer_bytes_are_counted_and_copied_in_rounds() -> None:
    """2 + 2 bytes an element of Muon's and 2 + 2 + 2 of AdamW's, in place of 4 + 4 and
    4 + 8.
    """
    bf16 = (
        "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    )
    wide, narrow = map(muon_row, ("", bf16))
    for kind in STATES:
        assert 0 < 2 * narrow.rest[kind] == wide.rest[kind]
    assert narrow.rest["parameters"] == wide.rest["parameters"]
    assert wide.peak < narrow.peak < wide.peak + wide.rest["Muon's momentum"]


def test_state_on_the_host_is_counted_there_and_two_rounds_of_it_here() -> None:
    """Main parameters are 2 bytes of Muon's beside a weight, 4 of AdamW's; moments are
    fp32.
    """
    words = "--use-precision-aware-optimizer --optimizer-cpu-offload"
    fraction = f"{words} --optimizer-offload-fraction 0.5"
    plain, hosted, half = map(muon_row, ("", words, fraction))
    assert [hosted.rest[kind] for kind in STATES] == [0, 0, 0]
    muons, moments = plain.rest["Muon's momentum"], plain.rest["AdamW's moments"]
    assert hosted.host == muons + muons // 2 + moments + moments // 2
    assert half.host == pytest.approx(hosted.host / 2, abs=8)
    left = sum(half.rest[kind] for kind in STATES)
    assert left == pytest.approx(hosted.host / 2, abs=8)
    assert plain.host == 0 and hosted.rest["parameters"] == plain.rest["parameters"]
    assert plain.peak < hosted.peak <= plain.peak + 4 * muons


def test_a_period_is_priced_as_its_mean_step() -> None:
    words = f"{' '.join(LLAMA_3_8B)} {TP} 8 --world-size 8"
    every, period = (
        planned(f"{words} {more}", wanted=()).kinds[0].row("contiguous")
        for more in ("", "--muon-full-period 5")
    )
    assert (every.full, every.block) == (None, None) and period.full == every.seconds
    assert 0 < period.block < period.full and period.whole > period.seconds
    assert replace(period, launching=9.0).whole == 9.0
    assert period.seconds == pytest.approx((period.full + 4 * period.block) / 5)


def test_a_rule_of_ones_own_is_said_to_be_priced_as_newton_schulz() -> None:
    """And how often the host waits, where it reads."""
    rule = "--muon-rule support.runs.own_rules:polar"
    plan = planned(f"{TINY} {rule} --world-size 1", wanted=())
    (note,) = plan.notes
    assert "the host waits for the device at each matrix" in note
    assert f"at most {plan.kinds[0].matrices} matrices a step" in note
    assert note.endswith("Newton-Schulz's are planned in their place")


@pytest.mark.parametrize("command", ["plan", "routes"])
@pytest.mark.parametrize(
    "flag",
    [
        "--muon-include nothing*",
        "--muon-exclude nothing*",
        "--muon-split nothing*=whole",
        "--muon-lr-mult nothing*=2",
        "--muon-wd-mult nothing*=2",
        "--muon-split *.final_layernorm.*=whole",  # which is not Muon's
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_as_in_a_run(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, *TINY_WORDS, "--world-size", "1", *flag.split()])
    name, pattern = flag.split("=")[0].split()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert (
        f"'{pattern}' in " in said.err
        and f"({name}) matches no parameter of " in said.err
    )


def test_a_pattern_may_match_on_a_stage_that_is_not_planned() -> None:
    words = (
        f"{TINY} --pipeline-model-parallel-size 2 --world-size 2 --stage 0 "
        "--muon-exclude"
    )
    assert planned(f"{words} *.layers.1.*").kinds[0].stages == (0,)
    with pytest.raises(ValueError, match="matches no parameter of the model"):
        planned(f"{words} *.layers.2.*")


def test_the_training_step_is_what_its_assumptions_say() -> None:
    plan = planned(
        f"{TINY} --world-size 4 --global-batch-size 8 --seq-length 32 --mfu 0.5"
    )
    active = sum(kind.share.active for kind in plan.kinds)
    # two layers, heads x head size is hidden
    flops = 8 * 32 * (6 * active + 6 * 2 * 64 * 32)
    head = " ".join(as_text(plan).split("\n\n")[0].split())
    assert (
        "a step of 8 sequences of 32 tokens, forward" in head and "MFU of 50%" in head
    )
    seconds = plan.training.seconds(H100)
    assert seconds == pytest.approx(flops / (4 * 0.5 * H100.dense_tflops * 1e12))
    ours = plan.seconds("contiguous")
    assert plan.share("contiguous") == pytest.approx(ours / (ours + seconds))


def test_512_ranks_are_planned_in_seconds() -> None:
    words = f"{' '.join(LLAMA_3_8B)} {OVERLAP} {TP} 8 --world-size 512"
    start = time.process_time()
    plan = planned(words)
    assert time.process_time() - start < 20
    assert plan.kinds[0].ranks == 512
    ours, theirs = (plan.kinds[0].row(name) for name in ("contiguous", "duplicated"))
    assert ours.flops.mean < theirs.flops.mean  # each matrix once, not on every TP rank


@pytest.mark.slow
def test_16384_ranks_take_less_than_30_seconds_and_4_gb_of_one_core() -> None:
    words = f"{' '.join(LLAMA_3_8B)} {OVERLAP} {TP} 8 --world-size 16384"
    program = [sys.executable, "-m", "megatron_muon", "plan", *words.split()]
    ended = subprocess.run(
        program, env=environment(), stdout=subprocess.PIPE, check=True
    )
    assert b"16384 rank(s)" in ended.stdout.replace(b",", b"")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime + used.ru_stime < 30
    assert used.ru_maxrss * 1024 < 4e9


def test_stages_that_lie_otherwise_in_their_nodes_are_no_kind() -> None:
    """Twelve ranks each: the second stage's begin in the middle of a node of eight."""
    from support.virtual_gpu.dry_run import stage_makeup

    stages = "--num-layers 4 --pipeline-model-parallel-size 4"
    run = asked(f"{TINY} {stages} --world-size 48 --muon-node-ranks 8").run
    with megatron_is_quiet():
        one, two = (stage_makeup(run, number) for number in (1, 2))
        config = dataclasses.replace(run.config, node_ranks=48)
        wide = dataclasses.replace(run, config=config)
        three, four = (stage_makeup(wide, number) for number in (1, 2))
    assert three == four
    assert one != two


def written(words: str) -> dict[str, Any]:
    return report_of("plan", *TINY_WORDS, *words.split())


def test_a_point_of_a_sweep_is_the_plan_with_that_flag() -> None:
    swept = written(f"{TP} 2 --sweep dp=1,2")
    alone = written(f"{TP} 2 --world-size 4")
    assert [point["value"] for point in swept["points"]] == ["1", "2"]
    last = swept["points"][-1]
    assert last["ranks"]["world"] == 4
    assert {key: last[key] for key in alone} == alone


def test_a_value_that_is_refused_has_a_reason_and_the_others_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where all are refused the command fails."""
    file = tmp_path / "sweep.json"
    for values, status, planned in (
        ("1,3,4", 0, [True, False, True]),
        ("3,5", 2, [False, False]),
    ):
        words = f"plan {TINY} --world-size 4 --sweep tp={values} --json {file}"
        assert main(words.split()) == status
        refused = "3: refused: --world-size 4 is not a multiple of TP"
        text = capsys.readouterr().out
        assert refused in text and text.count(": refused: ") == planned.count(False)
        points = json.loads(file.read_text())["points"]
        assert [bool(point.get("stages")) for point in points] == planned


def test_any_flag_can_be_swept() -> None:
    qkv = "*.linear_qkv.weight"
    words = f"--world-size 2 --sweep muon-split=none,{qkv}=whole,{qkv}=heads"
    swept = written(words)
    matrices = [point["stages"][0]["matrices"] for point in swept["points"]]
    # two layers of qkv, proj, fc1 and fc2: q, k and v are one, three or 3 x 4 heads
    assert matrices == [2 * (3 + 3), 2 * (1 + 3), 2 * (12 + 3)]


def test_batches_change_the_share_and_not_the_step() -> None:
    words = "--world-size 2 --seq-length 32 --sweep batch=8,16"
    small, large = written(words)["points"]
    assert large["training"]["seconds"] == pytest.approx(
        2 * small["training"]["seconds"]
    )
    one, two = (point["step"]["contiguous"] for point in (small, large))
    assert one["seconds"] == two["seconds"] and one["share"] > two["share"]


# The example of docs/performance.md, without its last flag: four ranks over PCIe.
PCIE = (
    "--num-layers 12 --hidden-size 1536 --num-attention-heads 12 --seq-length 1024 "
    "--max-position-embeddings 1024 --padded-vocab-size 50304 --bf16 "
    "--use-distributed-optimizer --world-size 4 --set node_gbytes=7 "
    "--set node_efficiency=1 --set pair_gbytes=7"
)


def test_local_homes_are_recommended_on_slow_links() -> None:
    """They beat balanced ones and the paper's algorithm, and ``--explain`` says so."""
    balanced, local = (
        planned(f"{PCIE} {more}").kinds[0] for more in ("", "--muon-homes local")
    )
    paper = balanced.row("paper").seconds
    assert local.row("contiguous").seconds < 0.0098 < 0.7 * paper
    assert paper < balanced.row("contiguous").seconds
    request = asked(PCIE)
    _, changed = explained(request, plan_run(request))
    assert changed[0]["change"] == "--muon-homes local"


def offered(words: str) -> set[str]:
    return {one.name for one in changes(planned(words))}


def test_what_is_in_force_is_not_offered() -> None:
    """Defaults are values, too; those of a preset are the preset's."""
    rounding = "--muon-preset fast", "--muon-ns-dtype fp16", "--muon-ns-iteration auto"
    at_defaults = offered(f"{TINY} --world-size 4")
    assert at_defaults.issuperset({*rounding, "--muon-homes local"})
    assert "--muon-ns-iteration standard" not in at_defaults
    fast = offered(f"{TINY} --world-size 4 --muon-preset fast")
    assert fast.isdisjoint(rounding) and "--muon-ns-iteration standard" in fast


def test_a_gain_is_the_difference_of_two_plans(
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = "--world-size 4 --muon-ns-dtype bf16"
    made = written(f"{base} --explain")
    by_change = {one["change"]: one for one in made["changes"]}
    assert "change, the fastest first" in capsys.readouterr().out
    plain = made["step"]["contiguous"]["seconds"]
    for words in ("--muon-ns-dtype fp16", "--products kernel", f"{TP} 2"):
        other = written(f"{base} {words}")
        seconds = other["step"]["contiguous"]["seconds"]
        assert by_change[words]["seconds"] == seconds
        assert by_change[words]["gain"] == pytest.approx((plain - seconds) / plain)
    seconds = [one["seconds"] for one in made["changes"]]
    assert seconds == sorted(seconds)
