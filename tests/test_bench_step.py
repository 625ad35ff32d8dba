"""``megatron-muon bench step``: what it says of each row is what was run."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from installed import VERSION
from ranks import run

from megatron_muon import MuonConfig
from megatron_muon.cli import main
from megatron_muon.cli.bench_measure import Found, Job, checksums_agree, measure
from megatron_muon.cli.bench_meter import Stopwatch, Times, count, peak_bytes
from megatron_muon.cli.bench_rows import build, rows
from megatron_muon.cli.bench_table import Line, as_json, as_text

ROOT = Path(__file__).parent.parent
SMALL = "--hidden 64 --layers 1 --heads 4 --vocab 512 --seq 16"
OURS = ["muon-contiguous", "muon-bucketed", "muon-paper"]
PAPER = ("dp_gather", "tp_gather")
MOE = "--num-experts 4 --moe-ffn-hidden-size 40"


HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def _bench(arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_muon.cli", "bench", "step", *arguments.split()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """Of two ranks: JSON, what was printed, and where the chart is."""
    folder = tmp_path_factory.mktemp("bench")
    chart = folder / "steps.svg"
    files = f"--json {folder / 'steps.json'}" + (f" --plot {chart}" if HAS_MATPLOTLIB else "")
    done = _bench(f"--tp 1 --dp 2 {SMALL} --rounds 2 --exchange none naive --parts {files}")
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "steps.json").read_text()), done.stdout + done.stderr, chart


def test_json_has_the_schema(printed: tuple[dict[str, Any], str, Path]) -> None:
    found, text, _ = printed
    assert found.keys() == {"topology", "rows"}
    assert found["topology"] == {"tp": 1, "pp": 1, "dp": 2, "ep": 1, "cp": 1}
    names = [row["name"] for row in found["rows"]]
    assert set(names) - {"upstream-layerwise"} >= {"adamw", *OURS}
    assert ("upstream-layerwise" in names) != ("upstream-layerwise is left out: " in text)
    for row in found["rows"]:
        assert list(row) == [
            *("name", "step_ms", "exchange_ms", "newton_schulz_ms", "sent_bytes"),
            *("ns_flops", "ns_flops_once", "state_bytes", "peak_bytes"),
            *("rounds_ms", "newton_schulz_cpu_ms_per_gflop"),
        ]
        step = row["step_ms"]
        assert step.keys() == {"median", "min", "max"}
        assert 0 < step["min"] <= step["median"] <= step["max"]
        assert step["median"] == statistics.median(row["rounds_ms"])
        assert (row["newton_schulz_cpu_ms_per_gflop"] is None) == (row["name"] == "adamw")
        parts = row["exchange_ms"] + row["newton_schulz_ms"]
        assert (row["name"] == "adamw") == (parts == 0) and parts <= 2 * step["max"]
        for by_rank in (*row["sent_bytes"].values(), row["ns_flops"], row["state_bytes"]):
            assert len(by_rank) == 2 and all(isinstance(number, int) for number in by_rank)
        assert all(0 < peak for peak in row["peak_bytes"])


def test_a_table_the_parts_and_a_chart_are_there(
    printed: tuple[dict[str, Any], str, Path],
) -> None:
    found, text, chart = printed
    for row in found["rows"]:
        assert f"\n{row['name']} " in text and f"{row['name']}: parts of the step" in text
        if HAS_MATPLOTLIB:  # an extra, which the tests' environment has not
            assert f"<!-- {row['name']} -->" in chart.read_text()
    assert "weights after a step of 5 Muon rows but upstream's: the same, bit by bit" in text
    assert "2 rounds; at least 7 are needed to compare" in text


def _flags(arguments: str) -> Namespace:
    from megatron_muon.cli.bench_step import command_parser, model_flags

    given, rest = command_parser().parse_known_args(f"{SMALL} {arguments}".split())
    return model_flags("bench", given, rest)


def _found(arguments: str, names: list[str]) -> dict[str, Any]:
    """On a rank: what each row costs, and the plans that ours has."""
    flags = _flags(arguments)
    chosen = rows(MuonConfig(), names, [], "duplicated")
    found = measure(Job(flags, tuple(chosen), 1))
    row = next(row for row in chosen if row.name == "muon-paper")
    built = build(row, flags, Stopwatch(torch.device("cpu")))
    parts = [part for part in built.optimizer.chained_optimizers if part.muon is not None]
    return {
        "rows": {row.name: one for row, one in zip(chosen, found, strict=True)},
        "plans": [part.muon.plan for part in parts],
        "rank": parts[0].stage_group.rank(),
    }


@pytest.fixture(
    scope="module",
    params=["--tp 2 --dp 2", "--tp 1 --dp 3 --hidden 96", f"--tp 1 --dp 4 --ep 2 {MOE}"],
)
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    flags = _flags(request.param)
    return run(_found, flags.world_size, request.param, ["adamw", *OURS])


def _by_formula(plan: Any, rank: int) -> dict[str, int]:
    """Bytes and flops of the paper's algorithm by the formulas of ``bench_paper``, from who owns
    each element and which matrix each row is of."""
    (place,) = [
        (ep, tp, row.index(rank))
        for ep, plane in enumerate(plan.grid)
        for tp, row in enumerate(plane)
        if rank in row
    ]
    ep, tp, dp = place
    tp_size, dp_size = len(plan.grid[0]), len(plan.grid[0][0])
    total: dict[str, int] = defaultdict(int)
    for parameter in plan.parameters:
        if parameter.ep_rank != ep:
            continue
        height, width = parameter.shape
        owner = torch.full((height * width,), -1)
        for other, piece in parameter.pieces(dp_size):
            owner[piece.start : piece.stop] = other
        matrix = torch.full((height, 1), -1)
        for block in parameter.blocks[tp]:
            matrix[block.rows.start : block.rows.stop] = block.matrix
        matrix = matrix.expand(height, width).reshape(-1)
        split = 1 if parameter.partition_dim is None else tp_size
        for index, shape in enumerate(parameter.matrices):
            owners = owner[matrix == index]
            mine, sharers = int((owners == dp).sum()), len(owners.unique())
            if not mine:
                continue
            m, n = sorted((shape.rows, shape.cols))
            total["dp_gather"] += 2 * mine * (sharers - 1)
            total["tp_gather"] += 2 * m * n // split * (split - 1)
            total["flops"] += 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
    return total


def test_the_papers_row_sends_and_computes_what_its_formulas_say(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        paper: Found = rank["rows"]["muon-paper"]
        wanted: dict[str, int] = defaultdict(int)
        for plan in rank["plans"]:
            for kind, number in _by_formula(plan, rank["rank"]).items():
                wanted[kind] += number
        sent = paper.counted.sent_bytes
        assert {kind: sent.get(kind, 0) for kind in PAPER} == {k: wanted[k] for k in PAPER}
        assert paper.counted.flops == wanted["flops"] > 0
    kinds = {kind for rank in found for kind in rank["rows"]["muon-paper"].counted.sent_bytes}
    assert "dp_gather" in kinds and kinds.isdisjoint({"gather", "scatter"})


def test_our_rows_send_what_is_planned_and_do_each_matrix_once(
    found: list[dict[str, Any]],
) -> None:
    for name in ("muon-contiguous", "muon-bucketed"):
        ranks: list[Found] = [rank["rows"][name] for rank in found]
        assert sum(one.counted.flops for one in ranks) == sum(one.ns_flops_once for one in ranks)
    for rank in found:  # the paper's row and ours in the same buckets have the same plan
        sent = rank["rows"]["muon-bucketed"].counted.sent_bytes
        planned = sum(plan.sent_bytes()[rank["rank"]] for plan in rank["plans"])
        assert sent.get("gather", 0) + sent.get("scatter", 0) == planned > 0
        once = sum(sum(plan.ns_flops()) for plan in rank["plans"])
        assert rank["rows"]["muon-bucketed"].ns_flops_once == (once if rank["rank"] == 0 else 0)


def test_all_muons_end_a_step_with_the_same_weights(found: list[dict[str, Any]]) -> None:
    """The paper's algorithm is another way to the same result; AdamW's is another."""
    by_row = {name: [rank["rows"][name] for rank in found] for name in ("adamw", *OURS)}
    assert checksums_agree([by_row[name] for name in OURS])
    assert not checksums_agree([by_row["adamw"], by_row["muon-paper"]])


def test_all_rows_reduce_and_gather_the_same_bytes(found: list[dict[str, Any]]) -> None:
    """But for the padding of buckets, at most 128 elements times the DP size for each."""
    for rank in found:
        costs = [rank["rows"][name].counted.sent_bytes for name in ("adamw", *OURS)]
        assert costs[0] == {k: v for k, v in costs[1].items() if k not in ("gather", "scatter")} | {
            "norm": costs[0]["norm"]  # ours votes, too
        }
        for kind, item in (("grad_reduce", 4), ("param_gather", 2)):
            sent = [cost[kind] for cost in costs]
            assert 0 <= max(sent) - min(sent) <= 20 * 128 * item * len(found)


def test_state_is_what_adamw_keeps_and_less(found: list[dict[str, Any]]) -> None:
    totals = {
        name: sum(rank["rows"][name].state_bytes for rank in found) for name in ("adamw", *OURS)
    }
    elements = sum(m.numel for plan in found[0]["plans"] for m in plan.matrices)
    assert {totals["adamw"] - totals[name] for name in OURS} == {4 * elements}


def _upstream(arguments: str) -> dict[str, Found]:
    flags = _flags(arguments)
    chosen = rows(MuonConfig(), ["upstream-layerwise", "muon-contiguous"], [], "duplicated")
    found = measure(Job(flags, tuple(chosen), 1))
    return {row.name: one for row, one in zip(chosen, found, strict=True)}


def test_megatrons_own_muon_orthogonalizes_on_every_tp_rank() -> None:
    pytest.importorskip("emerging_optimizers")
    if not (0, 16) <= VERSION < (0, 18):
        pytest.skip("megatron-core's own Muon is known of 0.16 and 0.17")
    ranks = run(_upstream, 4, "--tp 2 --dp 2")
    ours, theirs = (
        sum(found[name].counted.flops for found in ranks)
        for name in ("muon-contiguous", "upstream-layerwise")
    )
    assert theirs == 2 * ours > 0
    for found in ranks:
        kinds = {"tp_gather", "param_gather", "grad_reduce", "norm"}
        assert found["upstream-layerwise"].counted.sent_bytes.keys() == kinds


def _counted_collectives() -> dict[str, int]:
    watch = Stopwatch(torch.device("cpu"))
    rank = dist.get_rank()
    x = torch.ones(12)
    calls = {
        "gather": lambda: dist.all_gather_into_tensor(torch.empty(36), x),
        "scatter": lambda: dist.reduce_scatter_tensor(torch.empty(4), x),
        "dp_gather": lambda: dist.all_reduce(x),
        "tp_gather": lambda: dist.broadcast(x, src=1),
    }

    def step() -> None:
        for kind, call in calls.items():
            with watch.part(f"muon-{kind}"):
                call()
        with watch.part("params-all-gather"):
            sizes = [[0, 2, 1], [5, 0, 0], [3, 1, 0]]  # from each rank to each
            received = [row[rank] for row in sizes]
            dist.all_to_all_single(
                torch.empty(sum(received)), torch.ones(sum(sizes[rank])), received, sizes[rank]
            )

    return dict(count(watch, step).sent_bytes)


def test_bytes_are_counted_from_outside_whatever_the_collective() -> None:
    for rank, sent in enumerate(run(_counted_collectives, 3)):
        assert sent.pop("tp_gather", 0) == (2 * 48 if rank == 1 else 0)
        all_to_all = [3, 5, 4][rank] * 4
        assert sent == {
            "gather": 2 * 48,
            "scatter": 2 * 16,
            "dp_gather": 2 * 2 * 16,
            "param_gather": all_to_all,
        }


def test_a_parts_time_is_without_the_parts_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 2.0, 5.0, 6.0, 10.0])  # seconds at each begin and end
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    watch = Stopwatch(torch.device("cpu"))

    def step() -> None:
        watch("optimizer-inner-step").start(barrier=True)
        with watch.part("muon-gather"):
            pass
        watch("optimizer-inner-step").stop()

    times = watch.measure(step)
    assert times.ms == 10_000
    assert times.parts_ms == {"muon-gather": 3000, "optimizer-inner-step": 2000, "rest": 5000}


def test_the_peak_is_what_is_there_at_once() -> None:
    def step() -> None:
        first = torch.ones(1 << 20)  # 4 MiB
        second = first.double()  # 8 MiB beside it
        del first
        second.mul_(2)
        torch.ones(1 << 18).add_(1)  # 1 MiB, beside the second alone

    # what the operators themselves need for a moment is small
    assert 0 <= peak_bytes(torch.device("cpu"), step) - 3 * (4 << 20) < 1 << 16


def test_times_are_the_slowest_ranks() -> None:
    def one(*steps: float) -> Found:
        parts = [{"muon-gather": ms / 4, "muon-scatter": ms / 4, "rest": ms / 2} for ms in steps]
        return Found([Times(ms, part, 0.0) for ms, part in zip(steps, parts, strict=True)])

    line = Line("muon-contiguous", (one(1, 9, 2), one(4, 3, 8)))
    (row,) = as_json([line], {})["rows"]
    assert row["step_ms"] == {"median": 8, "min": 4, "max": 9}
    assert row["exchange_ms"] == 4 and row["newton_schulz_ms"] == 0


def test_ratios_are_printed_twice_where_ours_is_also_on_auto() -> None:
    def line(name: str, *steps: float) -> Line:
        return Line(name, (Found([Times(ms, {"rest": ms}, 0.0) for ms in steps]),))

    lines = [
        line("adamw", 1, 2, 4),
        line("muon-contiguous", 4, 4, 4),
        line("upstream-layerwise", 8, 4, 16),
    ]
    once = as_text(lines)
    assert "ours on auto" not in once
    assert "  muon-contiguous     2.00 (1.00 to 4.00) of adamw, 0.50 (0.25 to 1.00) of ups" in once
    equal, auto = as_text([*lines, line("muon-contiguous-auto", 2, 2, 2)]).split("ours on auto:")
    assert "-auto" not in equal[equal.index("step time to others'") :]
    assert "muon-contiguous-auto  1.00 (0.50 to 2.00) of adamw, 0.25 (0.12 to 0.50) of up" in auto
    assert "upstream-layerwise    4.00 (2.00 to 8.00) of adamw, 4.00 (2.00 to 8.00) of mu" in auto


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--rounds 0", "--rounds must be above 0, got 0"),
        ("--tp 3 --hidden 64 --heads 4", "4 attention heads do not divide --hidden 64, or --tp 3"),
        ("--ep 2", "--ep 2 needs --num-experts"),
        ("--layers 3 --pp 2", "--layers 3 is not a multiple of --pp 2"),
        ("--json no/such/x.json", "--json no/such/x.json: there is no folder no/such"),
        ("--dp 0", "--world-size 0 is not a multiple"),
        ("--muon-round-mib 0", "round_bytes must be at least 1, got 0"),
        ("--rows adam", "invalid choice: 'adam'"),
        ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "step", *arguments.split()])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("step --tp 2 --dp 4", "TP x PP x CP x DP makes 8 ranks, which need as many GPUs"),
        ("speeds --ranks 4", "--ranks makes 4 ranks, which need as many GPUs, and here are 3"),
    ],
)
def test_ranks_do_not_share_gpus(
    command: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *command.split()])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_ranks_end_when_the_command_is_killed() -> None:
    code = (
        "import time; from megatron_muon.cli.bench_ranks import Task, run_ranks\n"
        "run_ranks(Task(run=time.sleep, argument=100, world=2, gpus=False, threads=1, seconds=99))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as command:
        started = psutil.Process(command.pid)
        until = time.monotonic() + 100
        # a resource tracker, the fork server, and its two ranks
        while len(ranks := started.children(recursive=True)) < 4:
            assert time.monotonic() < until and command.poll() is None
            time.sleep(0.1)
        command.kill()
    assert psutil.wait_procs(ranks, timeout=30)[1] == []


def test_an_error_of_a_rank_is_the_commands() -> None:
    code = (
        "from megatron_muon.cli.bench_ranks import Task, run_ranks\n"
        "run_ranks(Task(run=int, argument='x', world=2, gpus=False, threads=1, seconds=60))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "RankError: rank " in done.stderr
    assert "invalid literal for int() with base 10: 'x'" in done.stderr
