"""``megatron-muon bench step``: what an optimizer step costs, Muon's beside others, in one run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import megatron_muon
from megatron_muon.cli.muon_flags import add_home_flags, homes_of
from megatron_muon.config import MuonConfig

_ROWS = ("adamw", "muon-contiguous", "muon-bucketed", "muon-paper", "upstream-layerwise")
_DESCRIPTION = """\
Start ranks on this machine, build the same GPT for every row, and let the rows take turns, one
optimizer step each and round by round in rotated order, on the same weights and gradients. Over
gloo where there is no GPU, over NCCL with a GPU a rank where there are."""

_EPILOG = """\
rows:
  adamw               Megatron's AdamW with its DistributedOptimizer
  muon-contiguous     this package's Muon, one bucket a grad buffer
  muon-bucketed       the same on Megatron's stock buckets, as with --overlap-grad-reduce: closed at
                      a fifth of a layer, as 40 M elements are of Llama-3-8B, or --ddp-bucket-size
  muon-paper          Algorithm 1 of arXiv 2502.16982, stock buckets: every rank that holds a piece
                      of a matrix gathers and orthogonalizes it
  upstream-layerwise  Megatron's own Muon over whole parameters, where it can be imported

A step is optimizer.step(): gradient norm, update, all-gather of the updated parameters.
The reduction of gradients is before it; what it sends is counted (kind grad_reduce), not timed.
Only the row whose turn it is is in memory. Every other flag is Megatron-LM's, of the model:
--swiglu, --num-experts 8, --multi-latent-attention, ...

AdamW on a CPU is megatron_muon.cpu's FusedAdam, plain torch in single roundings: ratios to it say
little about a GPU's."""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        0, or 1 where a rank failed; wrong arguments end the process with status 2.
    """
    from megatron_muon.cli.routes import megatron_is_quiet

    parser = command_parser()
    given, of_megatron = parser.parse_known_args(argv)
    with megatron_is_quiet():
        if not megatron_muon.cpu.enabled():
            megatron_muon.cpu.enable(allow_cuda=True)  # this process only starts ranks
        try:
            task, left_out = _task(given, model_flags(parser.prog, given, of_megatron))
        except (ValueError, TypeError, AssertionError) as error:
            parser.error(str(error))
    if left_out is not None:
        print(f"{parser.prog}: upstream-layerwise is left out: {left_out}", file=sys.stderr)
    from megatron_muon.cli.bench_ranks import RankError, run_ranks

    try:
        ranks = run_ranks(task)
    except RankError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    _report(given, task, ranks)
    return 0


def _task(given: Namespace, flags: Namespace) -> tuple[Any, str | None]:
    """What to run, and why upstream's row is not in it."""
    from megatron_muon.cli.bench_measure import Job, measure
    from megatron_muon.cli.bench_ranks import Task, gpus_for, threads_for
    from megatron_muon.cli.bench_rows import rows
    from megatron_muon.cli.bench_upstream import why_no_upstream
    from megatron_muon.cli.model import ranks_of

    world = ranks_of(flags).world
    _check(given, flags)
    gpus = gpus_for(world, "TP x PP x CP x DP", "--tp --pp --cp --dp")
    config = MuonConfig(
        ns_steps=given.ns_steps,
        **homes_of(given),
        round_bytes=round(given.muon_round_mib * (1 << 20)),
    )
    names = list(given.rows)
    left_out = why_no_upstream(flags) if "upstream-layerwise" in names else None
    if left_out is not None:
        names.remove("upstream-layerwise")
    chosen = rows(config, names, given.exchange, given.muon_tp_mode)
    if not chosen:
        raise ValueError(f"no row is left to measure: {left_out}")
    task = Task(
        run=measure,
        argument=Job(flags, tuple(chosen), given.rounds, given.traces),
        world=world,
        gpus=gpus,
        threads=threads_for(world, given.threads),
        seconds=60 * given.minutes,
    )
    return task, left_out


def _check(given: Namespace, flags: Namespace) -> None:
    """Errors that ranks would only find one by one."""
    for name in ("rounds", "threads", "minutes"):
        value = getattr(given, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name} must be above 0, got {value}")
    for name, size in (("hidden", given.hidden), ("layers", given.layers), ("seq", given.seq)):
        if size < 1:
            raise ValueError(f"--{name} must be at least 1, got {size}")
    if flags.expert_model_parallel_size > 1 and not flags.num_experts:
        raise ValueError(f"--ep {flags.expert_model_parallel_size} needs --num-experts")
    if given.layers % given.pp:
        raise ValueError(f"--layers {given.layers} is not a multiple of --pp {given.pp}")
    heads = flags.num_attention_heads
    if given.hidden % heads or heads % given.tp:
        raise ValueError(
            f"{heads} attention heads do not divide --hidden {given.hidden}, or --tp {given.tp} "
            "does not divide them: see --heads"
        )
    if given.traces is not None and not given.traces.is_dir():
        raise ValueError(f"--traces {given.traces}: there is no such folder")
    for name in ("json", "plot"):
        path = getattr(given, name)
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"--{name} {path}: there is no folder {path.parent}")
    if given.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")


def _report(given: Namespace, task: Any, ranks: Sequence[Sequence[Any]]) -> None:
    """Print the table and write the files.

    Args:
        given: the arguments.
        task: what was run.
        ranks: of each rank, what it found for each row.
    """
    from megatron_muon.cli import bench_table as table
    from megatron_muon.cli.bench_measure import checksums_agree

    rows = task.argument.rows
    lines = [
        table.Line(row.name, found)
        for row, found in zip(rows, zip(*ranks, strict=True), strict=True)
    ]
    for row, line in zip(rows, lines, strict=True):
        for text in line.ranks[0].lines if row.kind == "muon" else ():
            if "pipeline stage" in text:
                print(f"{row.name}: {text}")
    topology = {name: getattr(given, name) for name in ("tp", "pp", "dp", "ep", "cp")}
    sizes = " x ".join(f"{name.upper()} {size}" for name, size in topology.items() if size > 1)
    backend = "nccl" if task.gpus else f"gloo, {os.cpu_count()} cores"
    print(
        f"\n{sizes or 'one rank'} ({task.world} ranks over {backend}, {task.threads} thread(s) "
        f"each), hidden {given.hidden}, {given.layers} layers, {given.rounds} rounds"
        + ("; at least 7 are needed to compare" if given.rounds < 7 else "")
    )
    print(table.as_text(lines))
    if not task.gpus:
        print(f"\n{table.kernel_text(lines)}")
    if given.parts:
        print(f"\n{table.parts_text(lines)}")
    equal = [
        line.ranks
        for row, line in zip(rows, lines, strict=True)
        if row.kind in ("muon", "paper") and not row.name.endswith("-auto")
    ]
    if len(equal) > 1:
        same = "the same, bit by bit" if checksums_agree(equal) else "NOT the same"
        print(f"\nweights after a step of {len(equal)} Muon rows but upstream's: {same}")
    result = table.as_json(lines, topology)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    if given.plot is not None:
        from megatron_muon.cli.bench_plot import plot

        plot(result, given.plot)


def model_flags(program: str, given: Namespace, of_megatron: Sequence[str]) -> Namespace:
    """Megatron-LM's flags of the model and its ranks."""
    from megatron.core.transformer import TransformerConfig

    from megatron_muon.cli.flags import add_megatron_flags

    heads = given.heads or max(1, given.hidden // 64)
    sizes = {
        "tensor-model-parallel-size": given.tp,
        "pipeline-model-parallel-size": given.pp,
        "context-parallel-size": given.cp,
        "expert-model-parallel-size": given.ep,
        "world-size": given.tp * given.pp * given.cp * given.dp,
        "hidden-size": given.hidden,
        "num-layers": given.layers,
        "num-attention-heads": heads,
        "vocab-size": given.vocab,
        "seq-length": given.seq,
        "max-position-embeddings": given.seq,
    }
    if given.ffn is not None:
        sizes["ffn-hidden-size"] = given.ffn
    parser = _ModelParser(prog=program, allow_abbrev=False, add_help=False)
    parser.add_argument("--world-size", type=int)
    add_megatron_flags(parser, TransformerConfig)
    argv = [f"--{name}={size}" for name, size in sizes.items()]
    return parser.parse_args([*argv, *_LIKE_LLAMA, *of_megatron])


class _ModelParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


_LIKE_LLAMA = (
    *("--bf16", "--untie-embeddings-and-output-weights", "--disable-bias-linear"),
    *("--normalization=RMSNorm", "--position-embedding-type=rope", "--transformer-impl=local"),
)


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-muon bench step",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ranks = parser.add_argument_group("ranks")
    for name, default in (("tp", 2), ("pp", 1), ("dp", 2), ("cp", 1), ("ep", 1)):
        ranks.add_argument(f"--{name}", type=int, default=default, metavar="N", help="%(default)s")
    ranks.add_argument("--threads", type=int, metavar="N", help="of a rank (default: cores/ranks)")
    ranks.add_argument(
        "--minutes", type=float, default=60, metavar="N", help="to give up after (%(default)s)"
    )
    model = parser.add_argument_group("model")
    for name, size in (("hidden", 256), ("layers", 4), ("seq", 1024), ("vocab", 32_000)):
        model.add_argument(f"--{name}", type=int, default=size, metavar="N", help="%(default)s")
    model.add_argument("--heads", type=int, metavar="N", help="default: hidden / 64")
    model.add_argument("--ffn", type=int, metavar="N", help="default: Megatron's, 4 x hidden")
    _add_muon(parser.add_argument_group("what is measured"))
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    out.add_argument("--plot", type=Path, metavar="FILE", help="bar chart (png, svg, pdf)")
    out.add_argument(
        "--traces", type=Path, metavar="FOLDER", help="Chrome traces of a step of each row, rank 0"
    )
    out.add_argument("--parts", action="store_true", help="where each row's step goes")
    return parser


def _add_muon(group: argparse._ArgumentGroup) -> None:
    default = MuonConfig()
    group.add_argument(
        "--rows", nargs="+", choices=_ROWS, default=_ROWS, metavar="ROW", help="default: all"
    )
    group.add_argument(
        "--exchange",
        nargs="+",
        choices=["none", "naive"],
        default=[],
        help="further rows of muon-contiguous: all matrices in one round, and every parameter a "
        "round of its own",
    )
    group.add_argument("--rounds", type=int, default=7, metavar="N", help="%(default)s")
    group.add_argument("--ns-steps", type=int, default=default.ns_steps, help="%(default)s")
    add_home_flags(group)
    group.add_argument(
        "--muon-round-mib",
        type=float,
        default=default.round_bytes / (1 << 20),
        help="of ours (%(default)s)",
    )
    group.add_argument(
        "--muon-tp-mode",
        choices=["duplicated", "blockwise"],
        default="duplicated",
        help="of upstream-layerwise: gather over TP and orthogonalize on each TP rank, or each TP "
        "rank's slice by itself (%(default)s)",
    )
