"""Rows without a field: flags of a run."""

from __future__ import annotations

from megatron_muon.settings import kinds
from megatron_muon.settings.config import ROWS
from megatron_muon.settings.rows import free_row

RUN_ROWS = (
    free_row(
        "contiguous",
        "--muon-dp-layout",
        "How grad buffers are cut into shards with --overlap-grad-reduce. contiguous: "
        "by the fewest buckets that keep the overlap, unless --ddp-num-buckets or "
        "--ddp-bucket-size is given. bucketed: by Megatron's own. Without the overlap "
        "a buffer is one bucket.",
        kinds.choice(("contiguous", "bucketed")),
    ),
    free_row(
        "refuse",
        "--muon-from-adamw",
        "How an AdamW checkpoint is loaded. momentum: Muon's momentum starts as "
        "exp_avg / (1 - beta1). fresh: it starts at zero. refuse: the load is an "
        "error. It has no effect on a Muon checkpoint, so it may stay for restarts.",
        kinds.choice(("momentum", "fresh", "refuse")),
    ),
    free_row(
        False,
        "--adamw-from-muon",
        "Load a Muon checkpoint with --optimizer adam. Adam's moments and step count "
        "start at zero for Muon's parameters. Keep it for restarts; it has no effect "
        "on an AdamW checkpoint.",
        kinds.SWITCH,
        without="By default a Muon checkpoint is refused.",
        with_adamw="adamw_from_muon",
    ),
    free_row(
        False,
        "--muon-cpu",
        "Hide the GPUs and run on the CPU over gloo, with any optimizer. Options that "
        "need a GPU are replaced, and each replacement is printed.",
        kinds.SWITCH,
        without="By default a run takes the CPU only on one node without a GPU and "
        "NVIDIA's driver.",
    ),
    free_row(
        "plugin",
        "--muon-backend",
        "Implementation of --optimizer muon. plugin: megatron_muon. upstream: "
        "Megatron's own Muon, to which everything is left.",
        kinds.choice(("plugin", "upstream")),
    ),
)
FLAGS = tuple(flag for row in (*ROWS.values(), *RUN_ROWS) for flag in row.flags)
# Arguments of the flags that a run with any optimizer may have.
OF_ANY = ("muon_cpu",)
# Arguments that a run with AdamW may have beside a certain other one.
OF_ADAMW = {flag.dest: flag.with_adamw for flag in FLAGS if flag.with_adamw}
