"""What release 0.2.0 had and this version has not, each with what to do now.

A row stays for one minor version, so those of 0.2.0 go with 0.4.
"""

from __future__ import annotations

# Flags on Megatron-LM's command line, and those of the commands that take them.
FLAGS: dict[str, str] = {
    "--muon-early-param-gather": "leave it out; --overlap-param-gather hides the "
    "all-gather of parameters in the forward pass",
    "--muon-log-file": "leave it out; --muon-log-interval writes to TensorBoard and "
    "W&B (--tensorboard-dir, --wandb-project) and to the log",
}

# Settings of ``MuonConfig``.
FIELDS: dict[str, str] = {
    "early_param_gather": "leave it out; Megatron's overlap_param_gather hides the "
    "all-gather of parameters in the forward pass",
    "log_file": "give log_interval alone, and read megatron_muon.numbers(optimizer)",
}

# Public names of ``megatron_muon``.
NAMES: dict[str, str] = {}
