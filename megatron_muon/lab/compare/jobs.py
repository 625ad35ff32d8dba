"""The trainings of a topology: one for each optimizer, of the same model."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_muon.config import MuonConfig
from megatron_muon.lab.compare.topology import Topology
from megatron_muon.lab.dry_run.numbers import MOST_HERE

if TYPE_CHECKING:
    from megatron_muon.lab.compare.training import Job

_ROWS = {"adamw": "adamw", "muon": "muon-contiguous"}


def jobs_over(
    topology: Topology, given: Namespace, of_megatron: Sequence[str], program: str
) -> dict[str, Job]:
    """A training for each optimizer, by its name.

    Args:
        topology: how the ranks are divided.
        given: the command's own flags.
        of_megatron: Megatron's flags of the model, which came with them.
        program: name of the command, for errors.

    Raises:
        ValueError: sizes do not fit the topology, or Megatron refuses the model.
    """
    from megatron_muon.lab.bench.step.flags import model_flags
    from megatron_muon.lab.bench.step.rows import rows
    from megatron_muon.lab.compare.training import Job
    from megatron_muon.lab.dry_run.model import ranks_of, transformer_config

    if topology.world > MOST_HERE:
        raise ValueError(f"{topology} has {topology.world} ranks, at most {MOST_HERE} are taken")
    if given.layers % topology.pp:
        raise ValueError(f"--layers {given.layers} is not a multiple of {topology}'s pp")
    sequences = given.micro_batch_size * topology.dp
    if given.global_batch_size % sequences:
        raise ValueError(
            f"--global-batch-size {given.global_batch_size} is not a multiple of "
            f"--micro-batch-size x dp, {sequences} over {topology}"
        )
    sizes = Namespace(**vars(given), tp=topology.tp, pp=topology.pp, cp=topology.cp, dp=topology.dp)
    sizes.ep = 1
    flags = model_flags(
        program, sizes, ["--hidden-dropout=0", "--attention-dropout=0", *of_megatron]
    )
    transformer_config(flags, ranks_of(flags))  # raises Megatron's own errors
    rates = {"adamw": given.lr_adamw, "muon": given.lr_muon}
    batches = given.global_batch_size // sequences
    jobs = {}
    for optimizer, name in _ROWS.items():
        (row,) = rows(MuonConfig(), [name], [], "duplicated")
        jobs[optimizer] = Job(
            flags, row, rates[optimizer], given.steps, given.micro_batch_size, batches
        )
    return jobs
