"""Muon's flags and their help texts; ``settings`` turns them into settings."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from megatron_muon.settings.coefficients import SETS, NsDtype
from megatron_muon.settings.config import (
    EarlyParamGather,
    ElementwiseBy,
    MuonConfig,
    NsIteration,
    ScaleMode,
)

_PAPER = "arXiv 2502.16982"
_UPSTREAMS = "A flag of Megatron's own Muon."
_OURS = "A flag of megatron_muon."


class Flag(NamedTuple):
    """A flag that ``add_flags`` adds, or whose help it replaces.

    Attributes:
        option: the flag with its dashes.
        help: sentences that say what it does, its unit, when to change it, source and default.
        keywords: for ``add_argument``; unused where Megatron already has the flag.
    """

    option: str
    help: str
    keywords: dict[str, Any]

    @property
    def dest(self) -> str:
        return str(self.keywords.get("dest", self.option[2:].replace("-", "_")))


def _flag(option: str, help: str, **keywords: Any) -> Flag:
    return Flag(option, help, keywords)


def auto_or_number(text: str) -> int:
    """Parse a whole number or ``auto``, which becomes 0."""
    return 0 if text == "auto" else int(text)


def _ranks_that_share(text: str) -> int | str:
    """Parse a whole number, ``auto`` or ``off``."""
    return text if text in ("auto", "off") else int(text)


_MOONLIGHT = MuonConfig()
AUTO_NS_DTYPE = "fp16 on a GPU, bf16 on a CPU"  # Numerics.dtype
_ON = {"action": "store_true"}
FLAGS = (
    _flag(
        "--muon-matched-adamw-rms",
        f"Root mean square of a matrix's update, per unit of lr ({_PAPER}, eq. 4). AdamW's updates "
        "have 0.2 to 0.4, so AdamW's lr is one to start from, but seldom the best: see "
        "docs/switching_and_tuning.md. Raise it to raise the matrices' rate alone. "
        f"The default is {_MOONLIGHT.matched_adamw_rms}.",
        type=float,
    ),
    _flag(
        "--muon-momentum",
        f"mu in M <- mu M + G ({_PAPER}, Algorithm 1), at least 0 and below 1. "
        f"The default is {_MOONLIGHT.momentum} (Megatron's own Muon: 0.9).",
        type=float,
    ),
    _flag(
        "--muon-ns-steps",
        f"Newton-Schulz iterations for each matrix, 1 to 100 ({_PAPER}, section 2.1). The paper "
        f"found 10 no better than 5. The default is {_MOONLIGHT.ns_steps}.",
        type=int,
    ),
    _flag(
        "--no-muon-nesterov",
        f"Orthogonalize the momentum M. The default is Nesterov's form in {_PAPER}, G + mu M.",
        **_ON,
    ),
    _flag(
        "--muon-num-ns-steps",
        f"The same as --muon-ns-steps. {_UPSTREAMS} "
        f"The default is {_MOONLIGHT.ns_steps} (Megatron's own Muon: 5).",
        type=int,
    ),
    _flag(
        "--muon-nesterov",
        "Orthogonalize G + mu M. This is the default (Megatron's own Muon: M); --no-muon-nesterov "
        "turns it off. Megatron's own Muon has this flag from core 0.18 on.",
        **_ON,
    ),
    _flag(
        "--muon-use-nesterov",
        "The same as --muon-nesterov, and the default. Megatron's own Muon has this flag in core "
        "0.16 and 0.17.",
        **_ON,
    ),
    _flag(
        "--muon-scale-mode",
        "Factor on a direction: sqrt(max(rows, cols)) with spectral, sqrt(rows / cols) with "
        "unit_rms_norm, sqrt(max(1, rows / cols)) with shape_scaling. Rows are a matrix's outputs. "
        "The extra factor multiplies it. The formulas are those of Emerging-Optimizers' "
        f"get_muon_scale_factor. {_UPSTREAMS} The default is {_MOONLIGHT.scale_mode}.",
        choices=get_args(ScaleMode),
    ),
    _flag(
        "--muon-extra-scale-factor",
        "Factor on a direction, beside the scale mode's. With spectral it is the same as "
        f"--muon-matched-adamw-rms. {_UPSTREAMS} The default is {_MOONLIGHT.matched_adamw_rms} "
        "with spectral (Moonlight's mode), 1.0 with the others (Megatron's own Muon: 1.0).",
        type=float,
    ),
    _flag(
        "--muon-coefficient-type",
        "Polynomials of the Newton-Schulz iteration, by Emerging-Optimizers' name: the same as "
        f"--muon-ns-coefficients. {_UPSTREAMS} "
        "The default is simple (Megatron's own Muon: quintic).",
    ),
    _flag(
        "--muon-fp32-matmul-prec",
        "Precision of Newton-Schulz's products, as in torch.set_float32_matmul_precision. Only "
        "medium is accepted. Emerging-Optimizers runs it in bf16, which is --muon-ns-dtype bf16 "
        f"here. {_UPSTREAMS} The default is medium.",
        choices=("low", "medium", "high"),
    ),
    _flag(
        "--muon-no-split-qkv",
        "Orthogonalize a fused QKV weight as one matrix. "
        f"{_UPSTREAMS} The default is Q, K and V separately.",
        action="store_false",
        dest="muon_split_qkv",
    ),
    _flag(
        "--muon-tp-mode",
        "How a matrix that TP splits is orthogonalized. Here its home does it once, on the whole "
        "matrix, with duplicated's result. Another mode is an error unless TP is 1. "
        f"{_UPSTREAMS} "
        "The default is duplicated (Megatron's own Muon: blockwise up to core 0.19).",
        choices=("blockwise", "duplicated", "distributed"),
    ),
    _flag(
        "--muon-scalar-optimizer",
        "Optimizer of the parameters that are not Muon's. Only adam is accepted, with decoupled "
        f"weight decay as in {_PAPER}. {_UPSTREAMS} The default is adam.",
        choices=("adam", "lion"),
    ),
    _flag(
        "--muon-use-syrk",
        "Triton's symmetric product in Newton-Schulz: an error here. Megatron's own Muon has this "
        "flag after core 0.19. The default is torch's products.",
        **_ON,
    ),
    _flag(
        "--weight-decay-all-params",
        f"Decay norms' gammas and biases, too ({_PAPER}, appendix D, for long runs). Give it with "
        "--optimizer adam as well, so that a run of AdamW has the same decay. "
        f"{_OURS} By default they are not decayed.",
        **_ON,
    ),
    _flag(
        "--muon-qk-clip",
        "Threshold of attention logits. After a step the query and key rows of a head whose "
        "largest logit passed it are scaled so that it would be the threshold. This is QK-Clip of "
        "Kimi K2 (arXiv 2507.20534), which has 100. It needs Megatron's own attention "
        "(--transformer-impl local), on any core, and works with --optimizer adam, too. "
        f"For Transformer Engine's use Megatron's --qk-clip, from core 0.16 on. {_OURS} "
        "The default is no clip.",
        type=float,
        metavar="THRESHOLD",
    ),
    _flag(
        "--muon-qk-clip-alpha",
        f"The queries' share of the clip of --muon-qk-clip, above 0 and below 1. {_OURS} "
        f"The default is {_MOONLIGHT.qk_clip_alpha}, an equal share.",
        type=float,
    ),
    _flag(
        "--muon-include",
        "Give the parameters whose names match a pattern (*, ?, []) to Muon, whatever the routing "
        "says. megatron-muon routes prints the names. May be given several times. "
        f"{_OURS} The default is none.",
        action="append",
        metavar="PATTERN",
    ),
    _flag(
        "--muon-exclude",
        "Give the parameters whose names match a pattern to AdamW, whatever the routing says. "
        "Patterns are those of --muon-include. May be given several times. "
        f"{_OURS} The default is none.",
        action="append",
        metavar="PATTERN",
    ),
    _flag(
        "--muon-split",
        "Matrices of the weights whose names match a pattern. whole: one. qkv: of fused attention, "
        "and of MLA's linear_kv_up_proj. heads: of the same, and of q. gate-up: of a gated "
        "linear_fc1. parts: of MLA's down-projections, and of the in_proj of a Mamba mixer or a "
        "gated delta net. May be given several times; the last pattern that matches counts. See "
        f"docs/routing.md. {_OURS} "
        "The default is qkv for fused attention, whole for others.",
        action="append",
        metavar="PATTERN=KIND",
    ),
    _flag(
        "--muon-lr-mult",
        "Multiply the learning rate of the parameters whose names match a pattern, Muon's and "
        "AdamW's. They become parameter groups of Megatron's. May be given several times; the last "
        f"pattern that matches counts. {_OURS} The default is 1 for all.",
        action="append",
        metavar="PATTERN=FACTOR",
    ),
    _flag(
        "--muon-wd-mult",
        "The same as --muon-lr-mult for the weight decay. A parameter that Megatron does not decay "
        f"stays undecayed. {_OURS} The default is 1 for all.",
        action="append",
        metavar="PATTERN=FACTOR",
    ),
    _flag(
        "--muon-clip-scope",
        "Gradients that --clip-grad scales and whose norm decides. all: every parameter's, as in "
        "Megatron. adamw: those of AdamW's parameters; Megatron then logs their norm. "
        f"{_OURS} The default is {_MOONLIGHT.clip_scope}.",
        choices=("all", "adamw"),
    ),
    _flag(
        "--muon-homes",
        "Choice of the rank that orthogonalizes a matrix. balanced evens out the ranks' work. "
        "local sends the fewest bytes, and some ranks work longer. "
        f"{_OURS} The default is {_MOONLIGHT.homes}.",
        choices=("balanced", "local"),
    ),
    _flag(
        "--muon-split-matrices",
        "Number of ranks that orthogonalize a long or a large matrix together, each a strip of it. "
        "auto: up to 8, where that shortens the busiest rank's time. It helps stages whose largest "
        f"matrix has more work than a rank's share. {_OURS} The default is auto on a GPU. It is "
        "off on a CPU, with --deterministic-mode and with --muon-log-interval.",
        type=_ranks_that_share,
        metavar="auto|off|RANKS",
    ),
    _flag(
        "--muon-rank-tflops",
        "Speed of Newton-Schulz on a rank, in TFLOP/s, for the choice of homes. A run never "
        "measures it: megatron-muon bench speeds does, and prints the flag. "
        f"{_OURS} The default is {_MOONLIGHT.rank_tflops:g}, an assumption for an H100.",
        type=float,
    ),
    _flag(
        "--muon-link-gbytes",
        "Speed of the exchange, for the choice of homes: GB/s (10^9 bytes) that a rank sends, and "
        "as many that it receives. A run never measures it: megatron-muon bench speeds does, and "
        f"prints the flag. {_OURS} The default is {_MOONLIGHT.link_gbytes:g}, an assumption for a "
        "400 Gbit/s port per rank.",
        type=float,
    ),
    _flag(
        "--muon-node-ranks",
        "Ranks of a node, or of another group with fast links. Ranks that share a matrix are of "
        f"one node where that is faster. A run never measures it. {_OURS} "
        f"The default is {_MOONLIGHT.node_ranks}.",
        type=int,
        metavar="RANKS",
    ),
    _flag(
        "--muon-dp-layout",
        "How grad buffers are cut into shards with --overlap-grad-reduce. contiguous: the fewest "
        "buckets that keep the overlap, unless --ddp-num-buckets or --ddp-bucket-size is given; "
        "from core 0.18 on also an order in which shards cut few parameters. bucketed: Megatron's "
        f"own. Without the overlap a buffer is one bucket. {_OURS} The default is contiguous.",
        choices=("contiguous", "bucketed"),
    ),
    _flag(
        "--muon-early-param-gather",
        "With --overlap-param-gather, start the all-gather of a bucket of parameters within the "
        "step, as soon as they are updated; at most one after the last round, and with "
        "CUDA_DEVICE_MAX_CONNECTIONS=1 after each. The result is the same. auto: in "
        "Megatron-LM's own training loop, unless clipped attention logits, a CUDA graph of the "
        "full iteration, --perform-rl-step or --overlap-param-gather-with-optimizer-step forbid "
        "it. on: in any loop; an error where it cannot be. off: the forward pass starts them. "
        f"{_OURS} The default is {_MOONLIGHT.early_param_gather}.",
        choices=get_args(EarlyParamGather),
    ),
    _flag(
        "--muon-round-mib",
        "Cap on a rank's buffers for one round of the exchange, in MiB. A single larger parameter "
        "may pass it. Lower it to save memory; a step takes twice as much. "
        f"{_OURS} The default is 0: three times the largest parameter's buffers, at least 256.",
        type=int,
    ),
    _flag(
        "--muon-ns-dtype",
        f"Dtype that matrices are orthogonalized in. auto: {AUTO_NS_DTYPE}. Pieces travel in bf16, "
        f"with fp32 in fp32. {_OURS} {_PAPER} has bf16. The default is auto.",
        choices=("auto", *get_args(NsDtype)),
    ),
    _flag(
        "--muon-ns-coefficients",
        f"Polynomials of the Newton-Schulz iteration: a published set ({', '.join(SETS)}) or "
        "numbers. a,b,c is for every step; a,b,c;a,b,c;... has one triple for each step. See "
        f"docs/coefficients.md. {_OURS} The default is simple, the set of {_PAPER}.",
        metavar="NAME|NUMBERS",
    ),
    _flag(
        "--muon-ns-iteration",
        "How the polynomials are computed. standard: on the matrix. gram: on the short side's Gram "
        "matrix, with less work where a matrix is not square and some more rounding. auto: by "
        "shape. docs/coefficients.md has the error, and the coefficients, steps and dtypes for "
        "which gram is known to be accurate. With others gram is an error, and auto is standard. "
        f"{_OURS} The default is auto on a GPU, standard on a CPU.",
        choices=get_args(NsIteration),
    ),
    _flag(
        "--muon-ns-batch",
        "Most matrices of one shape that a GPU orthogonalizes at once. auto: as many as 1.5 times "
        "the largest matrix's memory holds, or 512 MiB if that is more. Unless it is 1, last bits "
        "depend on the layout. It has no effect on a CPU or with --deterministic-mode. "
        f"megatron-muon bench newton-schulz --batch measures it. {_OURS} "
        "The default is auto, which is 0.",
        type=auto_or_number,
        metavar="NUMBER|auto",
    ),
    _flag(
        "--muon-elementwise",
        "Kernels of momentum, norm and update on a GPU. auto: fused ones where triton is "
        "installed. foreach: torch's operations, if the fused ones fail their check at start. "
        "Both give the same bits, but for the order in which a norm's squares are added. "
        f"{_OURS} The default is {_MOONLIGHT.elementwise}.",
        choices=get_args(ElementwiseBy),
    ),
    _flag(
        "--muon-from-adamw",
        "How an AdamW checkpoint is loaded. momentum: Muon's momentum starts as "
        "exp_avg / (1 - beta1). fresh: it starts at zero. refuse: the load is an error. It has no "
        f"effect on a Muon checkpoint, so it may stay for restarts. {_OURS} The default is refuse.",
        choices=("momentum", "fresh", "refuse"),
    ),
    _flag(
        "--adamw-from-muon",
        "Load a Muon checkpoint with --optimizer adam. Adam's moments and step count start at zero "
        "for Muon's parameters. Keep it for restarts; it has no effect on an AdamW checkpoint. "
        f"{_OURS} By default a Muon checkpoint is refused.",
        **_ON,
    ),
    _flag(
        "--no-muon-checkpoint-digest",
        "Neither write nor check the digest of a checkpoint: size and checksum of its files, and "
        f"its parameters. {_OURS} By default it is written and checked.",
        **_ON,
    ),
    _flag(
        "--muon-nonfinite-limit",
        "End the run once so many lines of the log in a row (--log-interval) name a matrix whose "
        "direction was not finite. A step leaves such a matrix where it was, without decay. "
        f"{_OURS} The default is {_MOONLIGHT.nonfinite_limit}.",
        type=int,
        metavar="LINES",
    ),
    _flag(
        "--muon-log-interval",
        "Steps from one logging step to the next. A logging step writes each matrix's update, "
        "weight, momentum and direction in a few numbers to --muon-log-file, TensorBoard and W&B. "
        "Warnings go to the run's log. The training stays as it is, but a GPU shares no matrices "
        f"(--muon-split-matrices off). {_OURS} The default is never.",
        type=int,
        metavar="STEPS",
    ),
    _flag(
        "--muon-log-file",
        "File of JSON lines that --muon-log-interval appends to. The last rank writes it. "
        f"{_OURS} The default is muon_watch.jsonl in the folder of --tensorboard-dir, else of "
        "--save.",
        metavar="PATH",
    ),
    _flag(
        "--muon-cpu",
        "Hide the GPUs and run on the CPU over gloo, with any optimizer. Options that need a GPU "
        f"are replaced, and each replacement is printed. {_OURS} "
        "By default a run takes the CPU only on one node without a GPU and NVIDIA's driver.",
        **_ON,
    ),
    _flag(
        "--muon-trace-steps",
        "Steps to trace with torch's profiler, with any optimizer: FIRST:LAST, both included, or "
        f"one number. {_OURS} The default is none.",
        metavar="FIRST:LAST",
    ),
    _flag(
        "--muon-trace-dir",
        "Folder for the traces of --muon-trace-steps, with a file for each rank. megatron-muon "
        f"trace report reads it. {_OURS} The default is traces.",
        metavar="FOLDER",
    ),
    _flag(
        "--muon-defaults",
        f"Defaults of flags that are not given. moonlight: those of {_PAPER}. upstream: those of "
        "this Megatron's own Muon, for a run that goes on from its checkpoint. "
        f"{_OURS} The default is moonlight.",
        choices=("moonlight", "upstream"),
    ),
    _flag(
        "--muon-backend",
        "Implementation of --optimizer muon. plugin: megatron_muon. upstream: Megatron's own Muon, "
        f"to which everything is left. {_OURS} The default is plugin.",
        choices=("plugin", "upstream"),
    ),
)

# Dests of the flags that a run with any optimizer may have.
OF_ANY = ("muon_cpu", "muon_trace_steps", "muon_trace_dir")
