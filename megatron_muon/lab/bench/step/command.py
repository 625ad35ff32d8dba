"""``megatron-muon bench step``: the cost of Muon's optimizer step beside other optimizers'."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import megatron_muon
from megatron_muon.lab.bench import seams
from megatron_muon.lab.bench.muon_flags import HOMES, settings_of
from megatron_muon.lab.bench.step.flags import command_parser, model_flags
from megatron_muon.lab.charts import require_outputs
from megatron_muon.lab.dry_run import seams as dry_run_seams
from megatron_muon.lab.dry_run.numbers import MOST_HERE
from megatron_muon.settings.config import MuonConfig


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        0, or 1 where a rank failed, a file could not be written, or rows that must end a step with
        the same weights did not. Wrong arguments end the process with status 2.
    """
    from megatron_muon.lab.routes.model_flags import megatron_is_quiet
    from megatron_muon.mcore.seams.rows import check_rows
    from megatron_muon.presence import SeamError

    parser = command_parser()
    given, of_megatron = parser.parse_known_args(argv)
    with megatron_is_quiet():
        if not megatron_muon.cpu.enabled():
            megatron_muon.cpu.enable(allow_cuda=True)  # this process only starts ranks
        try:
            check_rows((*dry_run_seams.ROWS, *seams.ROWS))
            flags = model_flags(parser.prog, given, of_megatron)
            task, left_out = _task(given, flags)
        except (ValueError, TypeError, AssertionError, SeamError) as error:
            parser.error(" ".join(str(error).split()) or f"Megatron refuses this model: {error!r}")
    if left_out is not None:
        print(f"{parser.prog}: upstream-layerwise is left out: {left_out}", file=sys.stderr)
    from megatron_muon.lab.bench.ranks import RankError, run_ranks
    from megatron_muon.lab.bench.step.report import report

    try:
        return report(given, argv, flags, task, run_ranks(task))
    except BrokenPipeError:
        raise  # the reader of the output is gone, which is no error of a file
    except (RankError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1


def _task(given: Namespace, flags: Namespace) -> tuple[Any, str | None]:
    """The task of the ranks, and the reason if upstream's row is left out of it, or None."""
    from megatron_muon.lab.bench.ranks import Task, gpus_for, threads_for
    from megatron_muon.lab.bench.step.measure import StepJob, measure
    from megatron_muon.lab.bench.step.rows import rows
    from megatron_muon.lab.bench.step.upstream import why_no_upstream
    from megatron_muon.lab.dry_run.model import ranks_of, transformer_config

    ranks = ranks_of(flags)
    _check(given, flags)
    transformer_config(flags, ranks)  # raises Megatron's own errors
    gpus = gpus_for(ranks.world, "TP x PP x CP x DP", "--tp --pp --cp --dp")
    mib = given.muon_round_mib
    config = MuonConfig(
        ns_steps=given.ns_steps,
        **settings_of(given, HOMES),
        round_bytes=round(mib * (1 << 20)) if mib else None,
    )
    names = list(given.rows)
    left_out = why_no_upstream(flags) if "upstream-layerwise" in names else None
    if left_out is not None:
        names.remove("upstream-layerwise")
    chosen = rows(config, names, given.exchange, given.muon_tp_mode, given.gathers)
    if not chosen:
        raise ValueError(f"no row is left to measure: {left_out}")
    for row in chosen if given.traces is not None else ():
        if (given.traces / row.name).exists():
            raise ValueError(f"--traces {given.traces}: {row.name} is in it already")
    if not any(row.buckets for row in chosen):
        _refuse_buckets(flags)
    task = Task(
        run=measure,
        argument=StepJob(flags, tuple(chosen), given.rounds, given.traces),
        world=ranks.world,
        gpus=gpus,
        threads=threads_for(ranks.world, given.threads),
        seconds=60 * given.minutes,
        builds=True,
    )
    return task, left_out


def _refuse_buckets(flags: Namespace) -> None:
    for name in ("ddp_bucket_size", "ddp_num_buckets"):
        if getattr(flags, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} has no effect on these rows, which have one bucket a "
                "buffer: leave it out, or add muon-bucketed or muon-paper to --rows"
            )


def _check(given: Namespace, flags: Namespace) -> None:
    """Raise errors that ranks would only find one by one, or after all the work."""
    world = given.tp * given.pp * given.cp * given.dp
    if world > MOST_HERE:
        raise ValueError(f"--tp x --pp x --cp x --dp are {world} ranks, at most {MOST_HERE} here")
    if flags.expert_model_parallel_size > 1 and not flags.num_experts:
        raise ValueError(f"--ep {flags.expert_model_parallel_size} needs --num-experts")
    if (flags.num_experts or 0) % flags.expert_model_parallel_size:
        raise ValueError(
            f"--num-experts {flags.num_experts} is not a multiple of --ep "
            f"{flags.expert_model_parallel_size}"
        )
    if given.layers % given.pp:
        raise ValueError(f"--layers {given.layers} is not a multiple of --pp {given.pp}")
    heads = flags.num_attention_heads
    if given.hidden % heads or heads % given.tp:
        raise ValueError(
            f"{heads} attention heads do not divide --hidden {given.hidden}, or --tp {given.tp} "
            "does not divide them: see --heads"
        )
    groups = flags.num_query_groups if flags.group_query_attention else heads
    if "muon-paper" in given.rows and groups < given.tp and not flags.multi_latent_attention:
        raise ValueError(
            f"muon-paper gathers slices of one size from all TP ranks, but --tp {given.tp} cuts "
            f"{groups} query group(s), so that not every rank has some of Q, K and V: leave it "
            "out of --rows"
        )
    shared = getattr(flags, "muon_split_matrices", None)
    if "muon-paper" in given.rows and shared not in (None, "off"):
        raise ValueError(
            f"muon-paper takes whole matrices, --muon-split-matrices {shared} does not: leave one "
            "of them out"
        )
    if given.traces is not None and not given.traces.is_dir():
        raise ValueError(f"--traces {given.traces}: there is no such folder")
    require_outputs(given)
