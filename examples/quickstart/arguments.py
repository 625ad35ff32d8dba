"""The flags of train.py: Megatron's names and meanings, plus the plugin's
``--muon-*``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from corpus import TEXTS


def _words(line: str) -> list[str]:
    """The words of one line of an ``@file`` of flags; ``#`` starts a comment."""
    return line.split("#")[0].split()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses flags; ``@gpt.args`` reads more of them from a file. Later flags win."""
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    parser.convert_arg_line_to_args = _words  # type: ignore[method-assign]
    _add_topology(parser)
    _add_model(parser)
    _add_training(parser)
    _add_optimizer(parser)
    _add_output(parser)
    args = parser.parse_args(argv)
    # Megatron's scheduler asserts it without a word
    if args.lr_warmup_iters >= args.train_iters:
        parser.error(
            f"--lr-warmup-iters {args.lr_warmup_iters} must be below --train-iters "
            f"{args.train_iters}"
        )
    if args.record_update_rms and not args.bf16:
        parser.error(
            "--record-update-rms reads the fp32 main parameters, which are --bf16's"
        )
    if args.profile and args.tensorboard_dir is None:
        parser.error("--profile writes into --tensorboard-dir: give it, too")
    return args


def _switch(
    group: argparse._ArgumentGroup, *names: str, text: str | None = None
) -> None:
    for name in names:
        group.add_argument(name, action="store_true", help=text)


def _add_topology(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("topology")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    _switch(group, "--sequence-parallel", "--use-distributed-optimizer")
    _switch(group, "--overlap-grad-reduce", "--overlap-param-gather")


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", type=int, default=4)
    group.add_argument("--hidden-size", type=int, default=128)
    group.add_argument("--ffn-hidden-size", type=int, default=None)
    group.add_argument("--num-attention-heads", type=int, default=4)
    _switch(group, "--group-query-attention")
    group.add_argument("--num-query-groups", type=int, default=1)
    group.add_argument("--seq-length", type=int, default=128)
    group.add_argument("--init-method-std", type=float, default=0.02)
    _switch(group, "--use-mup", text="of megatron-core 0.17 and newer")
    group.add_argument("--mup-base-hidden-size", type=int, default=None)
    _switch(group, "--swiglu", "--untie-embeddings-and-output-weights", "--bf16")
    _switch(group, "--disable-bias-linear", "--multi-latent-attention")
    group.add_argument("--q-lora-rank", type=int, default=96)
    group.add_argument("--kv-lora-rank", type=int, default=64)
    group.add_argument("--qk-head-dim", type=int, default=32)
    group.add_argument("--qk-pos-emb-head-dim", type=int, default=16)
    group.add_argument("--v-head-dim", type=int, default=32)
    group.add_argument("--num-experts", type=int, default=None)
    group.add_argument("--moe-router-topk", type=int, default=2)
    group.add_argument("--moe-ffn-hidden-size", type=int, default=None)
    group.add_argument("--moe-aux-loss-coeff", type=float, default=0.01)


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=int, default=8)
    group.add_argument("--global-batch-size", type=int, default=32)
    group.add_argument("--train-iters", type=int, default=320)
    group.add_argument("--eval-interval", type=int, default=20)
    group.add_argument("--eval-iters", type=int, default=8)
    group.add_argument("--log-interval", type=int, default=20)
    group.add_argument(
        "--seed", type=int, default=1234, help="initial weights and data order"
    )
    group.add_argument(
        "--text", choices=TEXTS, default="library", help="what to train on"
    )
    _switch(group, "--evaluate-other-text", text="evaluate on the other text, too")


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--optimizer", choices=("adam", "muon"), default="adam")
    group.add_argument("--lr", type=float, required=True)
    group.add_argument("--min-lr", type=float, default=0.0)
    group.add_argument("--lr-decay-style", default="cosine")
    group.add_argument("--lr-warmup-iters", type=int, default=0)
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.999)
    group.add_argument("--adam-eps", type=float, default=1e-8)
    group.add_argument("--muon-rule", default="muon")
    group.add_argument("--muon-momentum", type=float, default=0.95)
    group.add_argument("--muon-matched-adamw-rms", type=float, default=0.2)
    group.add_argument("--muon-scale-mode", default="spectral")
    group.add_argument("--muon-ns-steps", type=int, default=5)
    _switch(group, "--no-muon-nesterov")
    group.add_argument(
        "--muon-split", action="append", default=[], metavar="PATTERN=KIND"
    )
    group.add_argument("--muon-log-interval", type=int, default=None)
    group.add_argument("--muon-clip-scope", choices=("all", "adamw"), default="all")
    group.add_argument("--muon-qk-clip", type=float, default=None, metavar="THRESHOLD")
    _switch(group, "--weight-decay-all-params", text="decay norms and biases too")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--tensorboard-dir", type=Path, default=None)
    group.add_argument(
        "--save", type=Path, default=None, help="save a checkpoint into it at the end"
    )
    group.add_argument(
        "--load", type=Path, default=None, help="go on from the checkpoint in it"
    )
    _switch(
        group,
        "--finetune",
        text="with --load: take the weights alone, and start at step 0",
    )
    group.add_argument("--exit-at", type=int, default=None, help="stop after this step")
    group.add_argument(
        "--from-other",
        choices=("momentum", "fresh"),
        default=None,
        help="the checkpoint is the other optimizer's: what Muon's momentum starts "
        "as (AdamW's moments start at zero)",
    )
    _switch(
        group,
        "--profile",
        text="trace steps with torch's profiler, into --tensorboard-dir on every rank",
    )
    group.add_argument("--profile-step-start", type=int, default=10)
    group.add_argument(
        "--profile-step-end", type=int, default=12, help="the first step without"
    )
    group.add_argument(
        "--figures", type=Path, default=None, help="JSON file for curve and figures"
    )
    _switch(
        group,
        "--log-max-attention-logit",
        text="record each step's largest attention logit (megatron-core 0.16 on)",
    )
    _switch(
        group,
        "--record-update-rms",
        text="with --bf16: root mean square of the layers' updates per unit of lr, "
        "half-way between the lines of the log, on the rank that writes --figures",
    )
