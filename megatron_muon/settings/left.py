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

# Coefficient sets, as the numbers that compute the same (of cans in 16 bits, where it
# divided the arguments of its polynomials by 1.01).
SETS: dict[str, str] = {
    "cans": "8.386435643564356,-24.369674493182085,17.725139734132405;"
    "4.1413861386138615,-3.0172735928626677,0.5524209782244783;"
    "3.922673267326733,-2.8672203559930542,0.5356751821225995;"
    "3.254059405940594,-2.392213537597265,0.48277368989166425;"
    "2.251188118811881,-1.5963296162965968,0.3960000191819288",
    "aol": "4.0098,-7.0585,2.4635;"
    "3.4585,-5.5479,2.5959;"
    "2.7573,-3.2939,1.4254;"
    "2.7215,-3.0494,1.3169",
    "cubic5": "3.3656576,-3.3420992,0.0;"
    "2.5744352,-1.4957376,0.0;"
    "2.5368962,-1.431257,0.0;"
    "2.4418906,-1.276404,0.0;"
    "2.2230472,-0.963065,0.0",
}
