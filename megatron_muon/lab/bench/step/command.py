"""``megatron-muon bench step``: the cost of Muon's optimizer step beside other
optimizers'.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

import megatron_muon
from megatron_muon.lab.bench import seams
from megatron_muon.lab.bench.step.flags import parsed
from megatron_muon.lab.dry_run import seams as dry_run_seams
from megatron_muon.lab.outputs import require_outputs
from megatron_muon.lab.progress import announce
from megatron_muon.lab.ranks import Task, gpus_for, run_ranks, threads_for
from megatron_muon.presence import SeamError, require_core
from megatron_muon.settings.config import MuonConfig

_PROGRAM = "megatron-muon bench step"
_SECONDS = 8 * 3600  # a bound on ranks that hang, also on each collective


def main(argv: Sequence[str]) -> int:
    """Run the command; wrong arguments end the process with status 2, as argparse
    does.
    """
    flags = parsed(argv, _PROGRAM)
    from megatron_muon.lab.routes.model_flags import megatron_is_quiet, stop
    from megatron_muon.mcore.seams.rows import check_rows

    try:
        require_core()
        announce(f"{_PROGRAM}: importing torch and Megatron")
        with megatron_is_quiet():
            if not megatron_muon.cpu.enabled():
                # this process only starts ranks
                megatron_muon.cpu.enable(allow_cuda=True)
            check_rows((*dry_run_seams.ROWS, *seams.ROWS))
            task = _task(flags)
    except (ValueError, TypeError, AssertionError, SeamError) as error:
        text = " ".join(str(error).split())
        stop(text or f"Megatron refuses this model: {error!r}", _PROGRAM)
    from megatron_muon.lab.bench.step.report import report

    announce(f"{_PROGRAM}: starting {task.world} rank(s)")
    return report(argv, flags, task, run_ranks(task))


def _task(flags: Namespace) -> Task:
    """The task of the ranks; says why upstream's row is not measured, if it is not."""
    from megatron_muon.lab.bench.step.measure import StepJob, measure
    from megatron_muon.lab.bench.step.rows import UPSTREAM, rows
    from megatron_muon.lab.bench.step.upstream import why_no_upstream
    from megatron_muon.lab.dry_run.chunks import transformer_config
    from megatron_muon.lab.dry_run.model import ranks_of

    _check(flags)
    ranks = ranks_of(flags)
    transformer_config(flags, ranks)  # raises Megatron's own errors
    gpus = gpus_for(ranks.world, "TP x PP x CP x DP", "--tp --pp --cp --dp")
    names = list(flags.rows)
    upstream = [name for name in names if name in UPSTREAM]
    left_out = why_no_upstream(flags) if upstream else None
    if left_out is not None:
        names = [name for name in names if name not in upstream]
        print(
            f"{_PROGRAM}: {', '.join(upstream)}: left out: {left_out}", file=sys.stderr
        )
    mib = flags.muon_round_mib
    config = MuonConfig(round_bytes=round(mib * (1 << 20)) if mib else None)
    chosen = rows(config, names, flags.exchange)
    if not chosen:
        raise ValueError(f"no row is left to measure: {left_out}")
    buckets = flags.ddp_bucket_size or flags.ddp_num_buckets
    if buckets and not any(row.buckets for row in chosen):
        raise ValueError(
            "these rows have one bucket a buffer: remove --ddp-bucket-size and "
            "--ddp-num-buckets, or add muon-bucketed to --rows"
        )
    for row in chosen if flags.traces is not None else ():
        if (flags.traces / row.name).exists():
            raise ValueError(f"--traces {flags.traces}: {row.name} is in it already")
    job = StepJob(flags, tuple(chosen), flags.rounds, flags.traces)
    threads = threads_for(ranks.world, flags.threads)
    return Task(measure, job, ranks.world, gpus, threads, _SECONDS, builds=True)


def _check(flags: Namespace) -> None:
    """Raise errors that ranks would only find one by one, or after all the work."""
    pp, ep = flags.pipeline_model_parallel_size, flags.expert_model_parallel_size
    if (flags.num_experts or 0) % ep:
        raise ValueError(
            f"--num-experts {flags.num_experts} is not a multiple of --ep {ep}"
        )
    if flags.num_layers % pp:
        raise ValueError(f"--layers {flags.num_layers} is not a multiple of --pp {pp}")
    if flags.traces is not None and not flags.traces.is_dir():
        raise ValueError(f"--traces {flags.traces}: there is no such folder")
    require_outputs(flags)
