"""Trains a byte-level GPT with megatron-core's model, schedules, DDP and optimizer.

    torchrun --standalone --nproc-per-node 8 train.py @gpt.args \
        --tensor-model-parallel-size 2 \
        --pipeline-model-parallel-size 2 --micro-batch-size 8 --optimizer muon --lr 0.02

Without torchrun it runs as one process. Without a GPU it runs on gloo.
"""
# ruff: noqa: E402 (megatron_muon.cpu.enable() has to run before Megatron is imported)

from __future__ import annotations

import json
import math
import os
import socket
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import megatron_muon.cpu

for (
    harmless
) in (  # what megatron-core 0.16.1 and torch 2.13 say on every rank of every CPU run
    "Apex is not installed",
    "full scope is deprecated",
    "When using async grad allreduce",
    "`torch.distributed.*` is deprecated",
):
    warnings.filterwarnings("ignore", message=harmless)
if not torch.cuda.is_available():
    megatron_muon.cpu.enable()  # before anything of Megatron is imported

import measure
from arguments import parse
from checkpoints import load, save
from corpus import HELD_OUT_STREAM, TEXTS, TRAIN_STREAM, Batches, Corpus, read_corpus
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from model import build_model
from progress import Progress

Microbatch = dict[str, torch.Tensor]


def start_distributed(args: Namespace) -> torch.device:
    """Joins torchrun's processes (or starts a world of one) and makes Megatron's
    groups.
    """
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    )
    model_parallel_cuda_manual_seed(args.seed)
    return device


def build_optimizer(
    args: Namespace, model: DistributedDataParallel
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Megatron's optimizer and learning-rate schedule for these flags."""
    of_adamw_too = (
        args.weight_decay_all_params,
        args.log_max_attention_logit,
        args.muon_qk_clip,
        args.profile,  # traces have its marks
    )
    if args.optimizer == "muon" or any(of_adamw_too):
        megatron_muon.install(
            megatron_muon.MuonConfig(
                rule=args.muon_rule,
                matched_adamw_rms=args.muon_matched_adamw_rms,
                scale_mode=args.muon_scale_mode,
                momentum=args.muon_momentum,
                nesterov=not args.no_muon_nesterov,
                ns_steps=args.muon_ns_steps,
                weight_decay_all_params=args.weight_decay_all_params,
                splits=tuple(tuple(each.rsplit("=", 1)) for each in args.muon_split),
                log_interval=args.muon_log_interval,
                clip_scope=args.muon_clip_scope,
                qk_clip=args.muon_qk_clip,
            )
        )
    config = OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(config, [model], **rates_by_width(args, config))
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters,
        lr_decay_steps=args.train_iters,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters,
        wd_incr_style="constant",
    )
    model.config.grad_scale_func = optimizer.scale_loss
    if args.overlap_grad_reduce:
        model.config.no_sync_func = model.no_sync
    return optimizer, scheduler


def rates_by_width(args: Namespace, config: OptimizerConfig) -> dict[str, Any]:
    """muP's, for AdamW's parameters, as Megatron-LM's training gives them."""
    if not args.use_mup:
        return {}
    from megatron.core import optimizer

    width = args.hidden_size / (args.mup_base_hidden_size or args.hidden_size)
    usual = optimizer.get_standard_config_overrides(config)
    mup = optimizer.get_mup_config_overrides(config, width, args.optimizer)
    return {"config_overrides": {**usual, **mup}}


def batches(args: Namespace, corpus: Corpus) -> tuple[Batches, list[Batches]]:
    """Training windows, and the held-out windows that every evaluation of every run
    uses.

    With ``--evaluate-other-text`` those of the other text follow.
    """
    cut = partial(
        Batches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
    )
    train = cut(corpus.train, TRAIN_STREAM, args.seed)
    per_micro = args.micro_batch_size * train.dp_size
    if args.global_batch_size % per_micro:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of "
            f"--micro-batch-size x data-parallel size = {per_micro}"
        )
    texts = [corpus.held_out]
    if args.evaluate_other_text:
        texts += [read_corpus(name).held_out for name in TEXTS if name != args.text]
    return train, [cut(text, HELD_OUT_STREAM, seed=0) for text in texts]


def forward_step(
    device: torch.device, microbatches: Iterator[Microbatch], model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    """Megatron's forward_step_func: the per-token losses and what turns them into the
    loss.
    """
    batch = {name: value.to(device) for name, value in next(microbatches).items()}
    output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return output, mean_loss


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean over tokens, and a copy to log (the schedule divides the first in
    place).
    """
    loss = losses.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def run_step(
    data: Batches,
    step: int,
    model: DistributedDataParallel,
    device: torch.device,
    training: bool,
) -> torch.Tensor:
    """Forward (and backward) over one global batch; the last stage gets this rank's
    mean loss.
    """
    reported = get_forward_backward_func()(
        forward_step_func=partial(forward_step, device),
        data_iterator=data.step(step),
        model=[model],
        num_microbatches=data.micro_batches,
        seq_length=data.seq_length,
        micro_batch_size=data.micro_batch_size,
        forward_only=not training,
    )
    if not parallel_state.is_pipeline_last_stage():
        return torch.zeros((), device=device)
    return torch.stack([entry["lm loss"] for entry in reported]).mean()


def global_loss(loss: torch.Tensor) -> float:
    """The mean of ``loss`` over data-parallel ranks. Raises if it is not finite."""
    torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    value = loss.item() / parallel_state.get_data_parallel_world_size()
    if not math.isfinite(value):
        raise FloatingPointError(f"the loss is {value}: try a lower --lr")
    return value


def evaluate(
    args: Namespace,
    held_out: Batches,
    model: DistributedDataParallel,
    device: torch.device,
) -> float:
    """The mean loss over ``--eval-iters`` held-out batches, the same ones every
    time.
    """
    model.eval()
    hooked = args.overlap_param_gather
    if hooked:
        model.disable_forward_pre_hook()
    with torch.no_grad():
        losses = [
            run_step(held_out, i, model, device, False) for i in range(args.eval_iters)
        ]
    if hooked:
        model.enable_forward_pre_hook()
    model.train()
    return global_loss(torch.stack(losses).mean())


def evaluate_all(
    args: Namespace,
    held_out: list[Batches],
    model: DistributedDataParallel,
    device: torch.device,
    progress: Progress,
    step: int,
) -> None:
    """Records the loss on each held-out text after ``step`` steps."""
    own, *others = (evaluate(args, text, model, device) for text in held_out)
    progress.evaluated(step, own)
    for loss in others:
        progress.evaluated_other(step, loss)


def profiled(args: Namespace, steps: range) -> Iterator[int]:
    """The steps; with ``--profile`` torch's profiler traces some, as in Megatron-LM."""
    if not args.profile:
        yield from steps
        return
    schedule = torch.profiler.schedule(
        wait=args.profile_step_start - 1,
        warmup=1,
        active=args.profile_step_end - args.profile_step_start,
        repeat=1,
    )
    with torch.profiler.profile(
        schedule=schedule,
        on_trace_ready=torch.profiler.tensorboard_trace_handler(
            str(args.tensorboard_dir), use_gzip=True
        ),
        record_shapes=True,
    ) as profiler:
        for step in steps:
            profiler.step()
            yield step


def train(
    args: Namespace, corpus: Corpus, device: torch.device, progress: Progress
) -> dict[str, Any]:
    """Runs ``--train-iters`` steps with evaluations; returns the run's cost figures."""
    model = build_model(args)
    optimizer, scheduler = build_optimizer(args, model)
    training, held_out = batches(args, corpus)
    step_seconds, optimizer_seconds = [], []
    done = load(args, model, optimizer, scheduler) if args.load else 0
    last = args.exit_at or args.train_iters
    evaluate_all(args, held_out, model, device, progress, done)
    for step in profiled(args, range(done + 1, last + 1)):
        recorded = (
            args.record_update_rms
            and step % args.log_interval == args.log_interval // 2
        )
        before = measure.main_matrices(model) if recorded else []
        began = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = run_step(training, step, model, device, True)
        reduced = time.perf_counter()
        updated, grad_norm, _ = optimizer.step()
        if not updated:
            raise FloatingPointError(
                f"Megatron skipped step {step}: gradients overflowed"
            )
        ended = time.perf_counter()
        if args.log_max_attention_logit:
            progress.watched(step, measure.largest_logit(model, device))
        lr = scheduler.get_lr(optimizer.param_groups[0])
        if recorded:
            progress.updated(
                step, measure.update_rms(before, model, lr, args.weight_decay)
            )
        scheduler.step(1)
        step_seconds.append(ended - began)
        optimizer_seconds.append(ended - reduced)
        scalars = {
            "learning-rate": lr,
            "grad-norm": grad_norm,
            "iteration-time": ended - began,
        }
        if args.optimizer == "muon":
            scalars.update(megatron_muon.numbers(optimizer))
        progress.trained(step, global_loss(loss), scalars)
        if step % args.eval_interval == 0 or step == last:
            evaluate_all(args, held_out, model, device, progress, step)
    if args.save:
        save(args.save, model, optimizer, last)
    return measure.collect(
        model, optimizer, args.optimizer, step_seconds, optimizer_seconds
    )


def record(
    args: Namespace, corpus: Corpus, progress: Progress, costs: dict[str, Any]
) -> None:
    """Writes the run's curve and figures to ``--figures``."""
    recent = [loss for _, loss in progress.curve["train"][-args.eval_interval :]]
    figures = {
        "topology": {
            "tp": args.tensor_model_parallel_size,
            "pp": args.pipeline_model_parallel_size,
            "dp": parallel_state.get_data_parallel_world_size(),
        },
        "corpus_sha256": corpus.sha256,
        "optimizer": args.optimizer,
        "seed": args.seed,
        "figures": {
            "val_loss": progress.curve["validation"][-1][1],
            "train_loss": sum(recent) / len(recent),
            "steps": args.train_iters,
            **costs,
            "lr": args.lr,
        },
        "curve": progress.curve,
    }
    args.figures.parent.mkdir(parents=True, exist_ok=True)
    args.figures.write_text(json.dumps(figures, indent=1) + "\n")


def main() -> None:
    args = parse()
    device = start_distributed(args)
    corpus = read_corpus(args.text)
    # The last stage alone has the loss; its first rank shows and writes it.
    shows = (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank() == 0
    )
    with Progress(args, shows) as progress:
        costs = train(args, corpus, device, progress)
    if shows and args.figures is not None:
        record(args, corpus, progress, costs)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
