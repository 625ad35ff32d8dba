"""Rows without a field: flags of a run, and flags of Megatron's own Muon with one
meaning here.
"""

from __future__ import annotations

from megatron_muon.settings import kinds
from megatron_muon.settings.config import ROWS
from megatron_muon.settings.rows import UPSTREAM, Only, free_row
from megatron_muon.settings.update import PAPER

RUN_ROWS = (
    free_row(
        "medium",
        "--muon-fp32-matmul-prec",
        "Precision of Newton-Schulz's products, as in "
        "torch.set_float32_matmul_precision. Only medium is accepted. "
        "Emerging-Optimizers runs it in bf16, which is --muon-ns-dtype bf16 here.",
        kinds.choice(("low", "medium", "high")),
        source=UPSTREAM,
        only=Only(
            # With it Emerging-Optimizers' newton_schulz casts matrices to bf16. high is
            # TF32, whose restarts are not known.
            "matrices are multiplied in bf16 (medium), fp16 or fp32 without TF32",
            "give --muon-ns-dtype bf16, fp16 or fp32 in its place",
        ),
    ),
    free_row(
        "duplicated",
        "--muon-tp-mode",
        "How a matrix that TP splits is orthogonalized. Here its home does it once, on "
        "the whole matrix, with duplicated's result. Another mode is an error unless "
        "TP is 1.",
        kinds.choice(("blockwise", "duplicated", "distributed")),
        source=UPSTREAM,
        without=(
            "The default is duplicated (Megatron's own Muon: blockwise up to "
            "core 0.19)."
        ),
        only=Only(  # as in Emerging-Optimizers
            "blockwise orthogonalizes each rank's slice by itself, so the update "
            "depends on TP, distributed only rounds elsewhere, and here a matrix is "
            "whole, at one home",
            "give --muon-tp-mode duplicated, or run with TP 1",
        ),
    ),
    free_row(
        "adam",
        "--muon-scalar-optimizer",
        "Optimizer of the parameters that are not Muon's. Only adam is accepted, with "
        f"decoupled weight decay as in {PAPER}.",
        kinds.choice(("adam", "lion")),
        source=UPSTREAM,
        only=Only(
            "Megatron's Adam updates the parameters that Muon does not", "leave it out"
        ),
    ),
    free_row(
        False,
        "--muon-use-syrk",
        "Triton's symmetric product in Newton-Schulz: an error here. Megatron has this "
        "flag after core 0.19.",
        kinds.SWITCH,
        source=UPSTREAM,
        without="The default is torch's products.",
        only=Only("Newton-Schulz's products are torch's here", "leave it out"),
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
        "",
        "--muon-trace-steps",
        "Steps to trace with torch's profiler, with any optimizer: FIRST:LAST, both "
        "included, or one number.",
        kinds.text("FIRST:LAST"),
        without="The default is none.",
    ),
    free_row(
        "",
        "--muon-trace-dir",
        "Folder for the traces of --muon-trace-steps, with a file for each rank. "
        "megatron-muon trace report reads it.",
        kinds.text("FOLDER"),
        without="The default is traces.",
    ),
    free_row(
        "moonlight",
        "--muon-defaults",
        f"Defaults of flags that are not given. moonlight: those of {PAPER}. upstream: "
        "those of this Megatron's own Muon, for a run that goes on from its "
        "checkpoint.",
        kinds.choice(("moonlight", "upstream")),
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
OF_ANY = ("muon_cpu", "muon_trace_steps", "muon_trace_dir")
