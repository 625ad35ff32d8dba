"""What ``megatron-muon bench step`` prints and writes, from its ranks' measurements."""

from __future__ import annotations

import importlib
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from megatron_muon.lab.bench.step import table
from megatron_muon.lab.bench.step.measure import Measured, checksums_agree
from megatron_muon.lab.bench.step.rows import UPSTREAM, Row, bucket_elements
from megatron_muon.lab.bench.step.upstream import lays_out_buffers
from megatron_muon.lab.dry_run.chunks import transformer_config
from megatron_muon.lab.dry_run.model import padded_vocab, ranks_of
from megatron_muon.lab.outputs import CommandError, write_json
from megatron_muon.lab.ranks import Task
from megatron_muon.lab.routes.model_flags import megatron_is_quiet
from megatron_muon.lab.tables import show
from megatron_muon.mcore.seams.rows import megatron_version
from megatron_muon.version import __version__

_DIMENSIONS = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}


def report(
    argv: Sequence[str],
    flags: Namespace,
    task: Task,
    ranks: Sequence[Sequence[Measured]],
) -> int:
    """Print the tables and write the files; a CommandError if weights differ that must
    not.
    """
    rows: tuple[Row, ...] = task.argument.rows
    lines = [
        table.Line(row.name, of_ranks)
        for row, of_ranks in zip(rows, zip(*ranks, strict=True), strict=True)
    ]
    sizes = {
        name: getattr(flags, f"{of}_model_parallel_size")
        for name, of in _DIMENSIONS.items()
    }
    topology = sizes | {"dp": flags.dp, "cp": flags.context_parallel_size}
    _print_tables(flags, topology, task, lines)
    verdicts = _weights(rows, lines)
    if verdicts:
        show("", *verdicts)
    result = table.as_json(lines, topology, _run_of(argv, flags, task))
    write_json(flags.json, result)
    if all(verdicts.values()):
        return 0
    raise CommandError(
        "rows of Muon with the same iteration ended a step with different weights, so "
        "the figures above are not of the same work"
    )


def _print_tables(
    flags: Namespace, topology: dict[str, int], task: Task, lines: Sequence[table.Line]
) -> None:
    backend = "nccl" if task.gpus else f"gloo, {os.cpu_count()} cores"
    sizes = [f"{name.upper()} {size}" for name, size in topology.items() if size > 1]
    show(
        "",
        f"{' x '.join(sizes) or 'one rank'} ({task.world} ranks over {backend}, "
        f"{task.threads} thread(s) each), hidden {flags.hidden_size}, "
        f"{flags.num_layers} layers, {flags.rounds} "
        f"rounds{'; at least 7 are needed to compare' if flags.rounds < 7 else ''}",
    )
    print(table.as_text(lines))
    if not task.gpus:
        times = {line.name: line.ns_cpu_ms_per_gflop() for line in lines}
        speeds = ", ".join(
            f"{name} {ms:.2f}" for name, ms in times.items() if ms is not None
        )
        if speeds:
            show("", f"Newton-Schulz, processor ms per Gflop: {speeds}")
    if any(line.name in UPSTREAM for line in lines):
        show(
            'upstream: coefficients "simple" as in the other rows; its own default, '
            '"quintic", '
            "needs as many products",
            f"{UPSTREAM[0]}: other mathematics, since each TP rank orthogonalizes its "
            "slice by itself; its default up to core 0.19",
        )
        if not task.gpus and not lays_out_buffers():
            show(
                "upstream: concurrent broadcasts replace its gather of parameters, "
                "since gloo cannot gather unequal parts; other rows' gathers are "
                "broadcasts, too"
            )
    if flags.parts:
        print(f"\n{table.parts_text(lines)}")


def _weights(rows: Sequence[Row], lines: Sequence[table.Line]) -> dict[str, bool]:
    """Whether rows with the same Newton-Schulz iteration end a step with the same
    weights.

    By a line to print for each set of two or more rows. Rows on ``auto`` are compared
    with each other only. Upstream's row is not compared: it rounds differently.
    """
    sets: dict[str, list[table.Line]] = {}
    for row, line in zip(rows, lines, strict=True):
        if row.kind == "muon":
            sets.setdefault(str(row.config.ns_iteration), []).append(line)
    verdicts = {}
    for members in sets.values():
        if len(members) > 1:
            agree = checksums_agree([line.ranks for line in members])
            names = ", ".join(line.name for line in members)
            verdict = "the same, bit by bit" if agree else "NOT the same"
            verdicts[f"weights after a step of {names}: {verdict}"] = agree
    return verdicts


def _run_of(argv: Sequence[str], flags: Namespace, task: Task) -> dict[str, Any]:
    """The measurement's arguments, model, machine and versions, for the JSON.

    A bucket of the rows with several buckets is closed at ``bucket_elements``; with
    ``--ddp-num-buckets`` their number is in ``buckets`` instead. ``model`` has
    Megatron's settings.
    """
    with megatron_is_quiet():
        model = transformer_config(flags, ranks_of(flags))
    names = ("hidden_size", "num_layers", "num_attention_heads", "ffn_hidden_size")
    versions = {
        "torch": torch.__version__,
        "megatron-core": megatron_version()[0],
        "megatron_muon": __version__,
    }
    if any(row.kind == "upstream" for row in task.argument.rows):
        upstream = importlib.import_module("emerging_optimizers")
        versions["emerging_optimizers"] = upstream.__version__
    buckets: dict[str, int] = {
        "bucket_elements": flags.ddp_bucket_size or bucket_elements(flags)
    }
    if flags.ddp_num_buckets is not None:
        buckets = {"buckets": flags.ddp_num_buckets}
    return {
        "arguments": list(argv),
        "model": {name: getattr(model, name) for name in names}
        | {"padded_vocab_size": padded_vocab(flags), "seq_length": flags.seq_length},
        **buckets,
        "ranks": task.world,
        "threads": task.threads,
        "cores": os.cpu_count(),
        "backend": "nccl" if task.gpus else "gloo",
        "versions": versions,
    }
