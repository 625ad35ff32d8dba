"""Text and JSON of ``megatron-muon bench step``, from its ranks' measurements."""

from __future__ import annotations

import importlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_muon.lab.bench.ranks import Task
from megatron_muon.lab.bench.step import table as table
from megatron_muon.lab.bench.step.measure import Measured, checksums_agree
from megatron_muon.lab.bench.step.rows import Row, bucket_elements
from megatron_muon.lab.bench.step.upstream import lays_out_buffers
from megatron_muon.lab.dry_run.model import padded_vocab, ranks_of, transformer_config
from megatron_muon.lab.routes.model_flags import megatron_is_quiet
from megatron_muon.mcore.seams.rows import megatron_version
from megatron_muon.version import __version__


def report(
    given: Namespace,
    argv: Sequence[str],
    flags: Namespace,
    task: Task,
    ranks: Sequence[Sequence[Measured]],
) -> int:
    """Print the tables and write the files.

    Args:
        given: values of the command's own flags.
        argv: all arguments of the command.
        flags: flags of the model and its ranks.
        task: the task that the ranks ran.
        ranks: each rank's measurements of each row.

    Returns:
        The exit status: 0, or 1 where rows that must end a step with the same weights did not.

    Raises:
        OSError: a file cannot be written.
    """
    rows: tuple[Row, ...] = task.argument.rows
    lines = [
        table.Line(row.name, of_ranks)
        for row, of_ranks in zip(rows, zip(*ranks, strict=True), strict=True)
    ]
    topology = {name: getattr(given, name) for name in ("tp", "pp", "dp", "ep", "cp")}
    _print_tables(given, topology, task, lines)
    verdicts = weights_verdicts(rows, lines)
    if verdicts:
        print("\n" + "\n".join(text for text, _ in verdicts))
    result = table.as_json(lines, topology, run_of(argv, flags, task))
    _write(given, result)
    if all(same for _, same in verdicts):
        return 0
    print(
        "megatron-muon bench step: error: rows of Muon with the same iteration ended a step with "
        "different weights, so the figures above are not of the same work",
        file=sys.stderr,
    )
    return 1


def _write(given: Namespace, result: dict[str, Any]) -> None:
    """Write the files that flags ask for; an error names the flag."""
    if given.json is not None:
        with _named_error(f"--json {given.json}"):
            given.json.write_text(json.dumps(result, indent=1) + "\n")
    if given.plot is not None:
        from megatron_muon.lab.bench.plot import plot

        with _named_error(f"--plot {given.plot}"):
            plot(result, given.plot)


@contextmanager
def _named_error(flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"{flag}: {error.strerror or error}") from error


def _print_tables(
    given: Namespace, topology: dict[str, int], task: Task, lines: Sequence[table.Line]
) -> None:
    for row, line in zip(task.argument.rows, lines, strict=True):
        for text in line.ranks[0].lines if row.kind == "muon" else ():
            if "pipeline stage" in text:
                print(f"{row.name}: {text}")
    sizes = " x ".join(f"{name.upper()} {size}" for name, size in topology.items() if size > 1)
    backend = "nccl" if task.gpus else f"gloo, {os.cpu_count()} cores"
    print(
        f"\n{sizes or 'one rank'} ({task.world} ranks over {backend}, {task.threads} thread(s) "
        f"each), hidden {given.hidden}, {given.layers} layers, {given.rounds} rounds"
        + ("; at least 7 are needed to compare" if given.rounds < 7 else "")
    )
    print(table.as_text(lines))
    kernel = "" if task.gpus else table.kernel_text(lines)
    if kernel:
        print(kernel)
    for note in table.notes(lines, broadcasts=not task.gpus and not lays_out_buffers()):
        print(note)
    if given.parts:
        print(f"\n{table.parts_text(lines)}")


def weights_verdicts(rows: Sequence[Row], lines: Sequence[table.Line]) -> list[tuple[str, bool]]:
    """Whether rows with the same Newton-Schulz iteration end a step with the same weights.

    Rows on ``auto`` are compared with each other only. Upstream's row is not compared: it rounds
    differently.

    Returns:
        For each set of two or more rows: a line to print, and whether the weights are the same.
    """
    sets: dict[str, list[table.Line]] = {}
    for row, line in zip(rows, lines, strict=True):
        if row.kind in ("muon", "paper"):
            sets.setdefault(str(row.config.ns_iteration), []).append(line)
    verdicts = []
    for alike in sets.values():
        if len(alike) > 1:
            same = checksums_agree([line.ranks for line in alike])
            names = ", ".join(line.name for line in alike)
            verdict = "the same, bit by bit" if same else "NOT the same"
            verdicts.append((f"weights after a step of {names}: {verdict}", same))
    return verdicts


def run_of(argv: Sequence[str], flags: Namespace, task: Task) -> dict[str, Any]:
    """The measurement's arguments, model, machine and versions, for the JSON.

    A bucket of the rows with several buckets is closed at ``bucket_elements``; with
    ``--ddp-num-buckets`` their number is in ``buckets`` instead. ``model`` has Megatron's settings.
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
    buckets: dict[str, int] = {"bucket_elements": flags.ddp_bucket_size or bucket_elements(flags)}
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
