"""What release 0.2.0 or a fork had and this version has not, each with what to do now.

A row stays for one minor version, so those of 0.2.0 go with 0.4.
"""

from __future__ import annotations

# Flags of a published command line that no Megatron has but Moonshot's fork, and what
# each is today; examples/moe_1b has the same table.
_BALANCE = "--moe-router-load-balancing-type"
FORK = {
    "--moe-router-activation-type": "--moe-router-score-function; softmax is "
    "refused with the experts' bias",
    "--moe-routed-scaling-factor": "--moe-router-topk-scaling-factor",
    "--moe-num-first-dense-layers": "--moe-layer-freq, for 2 of 18 ([0]*2+[1]*16)",
    "--expert-balance-factor": f"{_BALANCE} none, where it is 0",
    "--device-balance-factor": f"{_BALANCE} none, where it is 0",
    "--moe-global-batch-balance": "none with the experts' bias, which follows the "
    f"whole batch; without it {_BALANCE} global_aux_loss (core 0.15 and later)",
    "--no-interleaved-qkv": "none: Megatron's fused QKV is interleaved by query "
    "groups; Muon splits Q, K and V all the same",
    "--save-async-fast-checkpoint": "--async-save",
}

_PROFILE = (
    "give Megatron's --profile --use-pytorch-profiler --profile-step-start FIRST "
    "--profile-step-end END --profile-ranks RANK ... --tensorboard-dir FOLDER"
)
# Flags on Megatron-LM's command line, and those of the commands that take them.
FLAGS: dict[str, str] = {
    "--muon-early-param-gather": "leave it out; --overlap-param-gather hides the "
    "all-gather of parameters in the forward pass",
    "--muon-log-file": "leave it out; --muon-log-interval writes to TensorBoard and "
    "W&B (--tensorboard-dir, --wandb-project) and to the log",
    "--muon-defaults": "give the settings themselves; --optimizer dist_muon ends with "
    "those of Megatron's own Muon",
    # Megatron's, from core 0.16 on; ``flags`` accepts what is done here anyway
    "--muon-tp-mode": "leave it out; a matrix is orthogonalized whole, at its home, "
    "with duplicated's result (blockwise's steps are --muon-full-period)",
    "--muon-fp32-matmul-prec": "give --muon-ns-dtype bf16, fp16, or fp32, which is "
    "never TF32",
    "--muon-scalar-optimizer": "leave it out; Megatron's Adam updates the parameters "
    "that Muon does not",
    "--muon-use-syrk": "leave it out; --muon-symmetric-products chooses the kernel",
    "--muon-trace-dir": _PROFILE,
    "--muon-trace-steps": _PROFILE,
    "--muon-link-gbytes": "leave it out; on slow links give --muon-homes local "
    "(docs/performance.md)",
    "--muon-rank-tflops": "leave it out; strips are chosen by an H100's speed",
}

# Settings of ``MuonConfig``.
FIELDS: dict[str, str] = {
    "align_shards": "leave it out; parameters lie in Megatron's order, and a "
    "checkpoint in another order loads",
    "early_param_gather": "leave it out; Megatron's overlap_param_gather hides the "
    "all-gather of parameters in the forward pass",
    "log_file": "give log_interval alone, and read megatron_muon.numbers(optimizer)",
    "link_gbytes": "leave it out; on slow links set homes to 'local'",
    "rank_tflops": "leave it out; strips are chosen by an H100's speed",
}

# Public names of ``megatron_muon``.
NAMES: dict[str, str] = {
    "step_traces": """call torch.profiler around the loop:
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=FIRST - 1, warmup=1, active=STEPS),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(FOLDER),
        record_shapes=True,
    ) as profiler:
        ...  # profiler.step() before each step""",
}
