"""Options of Megatron-LM with Muon, in the real ``pretrain_gpt.py``: needs a checkout.

`bash tests/versions.sh --options CHECKOUT [CHECKOUT ...]` runs them over several
checkouts. With an option a run trains, or an error names it before training.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_muon.lab.trace.events import files_of
from megatron_muon.lab.trace.rank_trace import RankTrace
from support.megatron_lm.scripts import (
    MUON,
    known_flags,
    losses,
    needs_checkout,
    pretrain,
    version,
)

pytestmark = [needs_checkout, pytest.mark.timeout(900)]
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"

# (processes, options) by what they are called; a run has all of a row's options at
# once.
RUNS = {
    "parameters' norm, zeros in gradients, timers, TensorBoard, signal handler": (
        1,
        "--log-params-norm --log-num-zeros-in-grad --timing-log-level 2 "
        "--exit-signal-handler --tensorboard-dir {folder}/tensorboard "
        "--log-timers-to-tensorboard",
    ),
    "W&B offline": (
        1,
        "--wandb-project muon --wandb-exp-name one --wandb-save-dir {folder}/wandb "
        "--tensorboard-dir {folder}/tensorboard",
    ),
    "decoupled lr, start and end weight decay, evaluation, rerun state machine": (
        1,
        "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4 "
        "--untie-embeddings-and-output-weights --start-weight-decay 0.01 "
        "--end-weight-decay 0.1 --weight-decay-incr-style linear --eval-interval 2 "
        "--rerun-mode validate_results",
    ),
    "deterministic mode, full recompute, no check for NaN in loss and gradient": (
        1,
        "--deterministic-mode --no-check-for-nan-in-loss-and-grad "
        "--recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "--ddp-bucket-size with both overlaps, --ddp-average-in-collective": (
        2,
        f"--ddp-bucket-size 50000 {OVERLAP} --ddp-average-in-collective",
    ),
    "--ddp-num-buckets with both overlaps, --grad-reduce-in-bf16": (
        2,
        f"--ddp-num-buckets 3 {OVERLAP} --grad-reduce-in-bf16",
    ),
    "--num-distributed-optimizer-instances 2": (
        2,
        "--num-distributed-optimizer-instances 2",
    ),
    "--muon-rule hyperball": (
        2,
        f"--muon-rule hyperball --muon-radius *.linear_fc1.*=5 --weight-decay 0 {OVERLAP}",
    ),
    "--muon-rule normuon": (
        2,
        f"--muon-rule normuon --muon-moment2-beta2 0.9 {OVERLAP}",
    ),
    "--muon-rule torch:sign": (2, "--muon-rule torch:sign"),  # any function of matrices
    "update norm, decays, warm-up of the momentum": (
        2,
        "--muon-scale-mode update_norm --muon-cautious-decay --muon-independent-decay "
        f"--muon-momentum-warmup 3 --weight-decay 1e-3 {OVERLAP}",
    ),
    "--use-mup": (
        2,
        "--use-mup --mup-base-hidden-size 32 --muon-scale-mode unit_rms_norm "
        "--untie-embeddings-and-output-weights",
    ),
    "--fp16": (1, "--fp16 --initial-loss-scale 65536"),
    # fp32 weights in a bf16 model
    "--enable-hyper-connections": (2, "--enable-hyper-connections"),
}
# Options, and what the error must name.
REFUSED = {
    "--use-precision-aware-optimizer": r"use_precision_aware_optimizer|precision.aware",
    "--optimizer-cpu-offload --use-precision-aware-optimizer": r"precision.aware",
    "--use-custom-fsdp": r"use.(custom|megatron).fsdp",
    "--use-megatron-fsdp": r"use.megatron.fsdp|Megatron.FSDP (?:requires|only)",
    "--use-torch-fsdp2": r"fsdp2|TorchFullyShardedDataParallel",
    # without a GPU it is refused for that reason
    "--fp8-format e4m3 --fp8-param-gather": r"fp8.param",
    "--optimizer-cuda-graph": r"optimizer.cuda.graph",
    # Megatron divides by it, with AdamW, too
    "--eval-interval 0": r"^Megatron divides by --eval-interval",
    **{
        flag: f"{flag} yet: "
        for flag in (
            "--chunked-optimizer-state-offload",
            "--offload-optimizer-states",
            "--low-memory-resume",
            "--head-wise-attn-gate",
            "--use-dualpipev",
        )
    },
}
ENVIRONMENT = {
    "WANDB_MODE": "offline",
    "NCCL_ALGO": "Ring",  # deterministic mode asks for it
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


# What the first run prints, the last of a timer of level 1.
SIGNS = ("params norm:", "num zeros:", "optimizer-inner-step")


def known(options: str) -> str:
    """The options of a run whose flags this Megatron has."""
    for flag in re.findall(r"(?<!\S)--[\w-]+", options):
        if flag not in known_flags():
            pytest.skip(f"this Megatron has no {flag}")
    return options if "--fp16" in options else f"--bf16 {options}"


@pytest.mark.parametrize("row", RUNS)
def test_an_option_runs(row: str, tmp_path: Path) -> None:
    processes, options = RUNS[row]
    if "wandb" in options:
        pytest.importorskip("wandb")
    given = known(options.format(folder=tmp_path))
    text = pretrain(processes, MUON, given, **ENVIRONMENT)
    by_step = losses(text)
    assert len(by_step) >= 6 and by_step[5] < by_step[0], text[-3000:]
    assert "is active: Distributed Muon" in text
    events = [file.read_bytes() for file in tmp_path.rglob("events.out.tfevents.*")]
    # up to 0.14 timers that are written there are not printed
    for sign in SIGNS if "--log-params-norm" in options else ():
        assert sign in text or any(sign.encode() in event for event in events), sign
    assert events or "tensorboard" not in options


@pytest.mark.parametrize("options", REFUSED)
def test_an_option_is_refused(options: str) -> None:
    # Megatron wants that
    more = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"} if "fsdp" in options else {}
    processes = 2 if options == "--use-torch-fsdp2" else 1
    text = pretrain(processes, MUON, known(options), fails=True, **more)
    error = (
        r"(?:^|\]: )\w+(?:Error|Exception): (.*(?:\n  --.*)*)"  # a list of options, too
    )
    errors = re.findall(error, text, re.MULTILINE)
    refusals = [error for error in errors if re.search(REFUSED[options], error)]
    assert refusals, text[-3000:]
    assert losses(text) == []


ADAM = "--optimizer adam --use-distributed-optimizer"


@pytest.mark.parametrize("optimizer", [MUON, ADAM], ids=["muon", "adam"])
def test_megatrons_profiler_shows_the_marks_of_both_optimizers_which_train_the_same(
    optimizer: str, tmp_path: Path
) -> None:
    plain = pretrain(2, optimizer, "--bf16")
    flags = (
        "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 5 "
        f"--profile-ranks 0 1 --tensorboard-dir {tmp_path / 'events'}"
    )
    beside = tmp_path / "torch_profile"  # where newer Megatrons write
    if version() >= (0, 19):
        flags += " --pytorch-profiler-collect-shapes"
    traced = pretrain(2, optimizer, "--bf16", flags)
    assert losses(traced) == losses(plain) and len(losses(plain)) >= 6
    files = files_of(beside if beside.exists() else tmp_path / "events")
    traces = [RankTrace(file) for file in files]
    assert [len(trace.steps) for trace in traces] == [2, 2]
    assert all(trace.optimizer is not None for trace in traces)
    calls = [call for trace in traces for call in trace.calls]
    gathered = {call.place for call in calls}
    assert {"grads/reduce", "params/gather"} <= gathered
    assert ({"muon/gather", "muon/scatter"} <= gathered) == (optimizer is MUON)
    assert all(call.bytes > 0 for call in calls if call.place == "grads/reduce")
