"""Muon's flags and their help texts; ``settings`` turns them into settings."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from megatron_muon.coefficients import SETS, NsDtype
from megatron_muon.config import ElementwiseBy, MuonConfig, NsIteration, ScaleMode

_PAPER = "arXiv 2502.16982"
_UPSTREAMS = "Megatron's own Muon flag"
_OURS = "megatron_muon flag"


class Flag(NamedTuple):
    """A flag that ``add_flags`` adds, or whose help it replaces.

    Attributes:
        option: the flag with its dashes.
        help: meaning, unit, source and default.
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
AUTO_NS_DTYPE = "fp16 on a GPU, bf16 on a CPU"  # iteration.dtype_of
_ON = {"action": "store_true"}
FLAGS = (
    _flag(
        "--muon-matched-adamw-rms",
        f"root mean square of a matrix's update, per unit of lr ({_PAPER}, eq. 4; AdamW's updates "
        "have 0.2 to 0.4), so that AdamW's lr is a starting point, seldom the best: see "
        f"docs/switching_and_tuning.md; default {_MOONLIGHT.matched_adamw_rms}",
        type=float,
    ),
    _flag(
        "--muon-momentum",
        f"μ in M ← μM + G ({_PAPER}, Algorithm 1); default {_MOONLIGHT.momentum} (Megatron's own "
        "Muon: 0.9)",
        type=float,
    ),
    _flag(
        "--muon-ns-steps",
        f"Newton-Schulz iterations ({_PAPER}, section 2.1); default {_MOONLIGHT.ns_steps}",
        type=int,
    ),
    _flag(
        "--no-muon-nesterov",
        f"orthogonalize M in place of G + μM, the Nesterov form of {_PAPER}; default: G + μM",
        **_ON,
    ),
    _flag(
        "--muon-num-ns-steps",
        f"the same as --muon-ns-steps; {_UPSTREAMS}; default {_MOONLIGHT.ns_steps} (Megatron's own "
        "Muon: 5)",
        type=int,
    ),
    _flag(
        "--muon-nesterov",
        f"orthogonalize G + μM; {_UPSTREAMS} since core 0.18; the same default, "
        "--no-muon-nesterov turns it off (Megatron's own Muon: off)",
        **_ON,
    ),
    _flag(
        "--muon-use-nesterov",
        f"the same as --muon-nesterov; {_UPSTREAMS} in core 0.16 and 0.17; the same default",
        **_ON,
    ),
    _flag(
        "--muon-scale-mode",
        "factor on a direction, times the extra factor: sqrt(max(rows, cols)), sqrt(rows / cols) "
        "or sqrt(max(1, rows / cols)); rows are a matrix's outputs (Emerging-Optimizers' "
        f"get_muon_scale_factor); {_UPSTREAMS}; default {_MOONLIGHT.scale_mode}",
        choices=get_args(ScaleMode),
    ),
    _flag(
        "--muon-extra-scale-factor",
        "factor on a direction, times the scale mode's; with spectral it is the same as "
        f"--muon-matched-adamw-rms; {_UPSTREAMS}; default {_MOONLIGHT.matched_adamw_rms} with "
        "spectral (Moonlight's mode), 1.0 with the others (Megatron's own Muon: 1.0)",
        type=float,
    ),
    _flag(
        "--muon-coefficient-type",
        "polynomials of the Newton-Schulz iteration by Emerging-Optimizers' name, the same as "
        f"--muon-ns-coefficients; {_UPSTREAMS}; default simple (Megatron's own Muon: quintic)",
    ),
    _flag(
        "--muon-fp32-matmul-prec",
        "precision of Newton-Schulz's products, as in torch.set_float32_matmul_precision; only "
        "medium, which Emerging-Optimizers runs in bf16: --muon-ns-dtype bf16; "
        f"{_UPSTREAMS}; default medium",
        choices=("low", "medium", "high"),
    ),
    _flag(
        "--muon-no-split-qkv",
        f"orthogonalize a fused QKV weight as one matrix; {_UPSTREAMS}; default: Q, K and V "
        "separately",
        action="store_false",
        dest="muon_split_qkv",
    ),
    _flag(
        "--muon-tp-mode",
        "how a matrix that TP splits is orthogonalized; here its home does it once, on the whole "
        "matrix, with duplicated's result; another mode is an error unless TP is 1; "
        f"{_UPSTREAMS}; default duplicated (Megatron's own Muon: blockwise up to core 0.19)",
        choices=("blockwise", "duplicated", "distributed"),
    ),
    _flag(
        "--muon-scalar-optimizer",
        "optimizer of the parameters that are not Muon's; only adam (with decoupled weight decay, "
        f"as in {_PAPER}); {_UPSTREAMS}; default adam",
        choices=("adam", "lion"),
    ),
    _flag(
        "--muon-use-syrk",
        "Triton's symmetric product in Newton-Schulz, an error here; "
        f"{_UPSTREAMS} after core 0.19; default: torch's products",
        **_ON,
    ),
    _flag(
        "--weight-decay-all-params",
        f"decay norms' gammas and biases too ({_PAPER}, appendix D); also with --optimizer adam, "
        f"for the AdamW twin of such a run; {_OURS}; default: they are not decayed",
        **_ON,
    ),
    _flag(
        "--muon-qk-clip",
        "threshold of attention logits: after a step, scale the query and key rows of a head whose "
        "largest logit passed it, so that it would be the threshold (QK-Clip of Kimi K2, arXiv "
        "2507.20534, which has 100); with Megatron's own attention (--transformer-impl local) on "
        "every core, and with --optimizer adam, too; for Transformer Engine's there is Megatron's "
        f"--qk-clip from core 0.16 on; {_OURS}; default: off",
        type=float,
        metavar="THRESHOLD",
    ),
    _flag(
        "--muon-qk-clip-alpha",
        "the queries' share of the clip of --muon-qk-clip, above 0 and below 1; "
        f"{_OURS}; default {_MOONLIGHT.qk_clip_alpha}, an equal share",
        type=float,
    ),
    _flag(
        "--muon-include",
        "parameters that are Muon's whatever the routing says: a pattern of names (*, ?, []; "
        f"megatron-muon routes prints the names); may be given several times; {_OURS}; "
        "default none",
        action="append",
        metavar="PATTERN",
    ),
    _flag(
        "--muon-exclude",
        "parameters that are AdamW's whatever the routing says: a pattern of names, as in "
        f"--muon-include; may be given several times; {_OURS}; default none",
        action="append",
        metavar="PATTERN",
    ),
    _flag(
        "--muon-split",
        "the matrices of the weights whose names match a pattern: whole; qkv (of fused attention, "
        "and of MLA's linear_kv_up_proj); heads (of the same, and of q); gate-up (of a gated "
        "linear_fc1); parts (of MLA's down-projections, and of the in_proj of a Mamba mixer or "
        "a gated delta net); may be given several times, and the last pattern that matches "
        f"counts; {_OURS}; default qkv for fused attention, whole for others",
        action="append",
        metavar="PATTERN=KIND",
    ),
    _flag(
        "--muon-lr-mult",
        "multiply the learning rate of the parameters whose names match a pattern, Muon's and "
        "AdamW's, by a factor; they are groups of Megatron's; may be given several times, and the "
        f"last pattern that matches counts; {_OURS}; default 1 for all",
        action="append",
        metavar="PATTERN=FACTOR",
    ),
    _flag(
        "--muon-wd-mult",
        "the same for the weight decay; what Megatron does not decay stays undecayed; "
        f"{_OURS}; default 1 for all",
        action="append",
        metavar="PATTERN=FACTOR",
    ),
    _flag(
        "--muon-clip-scope",
        "the gradients that --clip-grad scales and whose norm decides: all, as in Megatron, or "
        "adamw: those of AdamW's parameters only, whose norm Megatron then logs; "
        f"{_OURS}; default {_MOONLIGHT.clip_scope}",
        choices=("all", "adamw"),
    ),
    _flag(
        "--muon-homes",
        "which rank orthogonalizes a matrix: balanced evens out the ranks' work, local sends the "
        f"fewest bytes; {_OURS}; default {_MOONLIGHT.homes}",
        choices=("balanced", "local"),
    ),
    _flag(
        "--muon-split-matrices",
        "ranks that orthogonalize a long or a large matrix together, each a strip of it, or auto: "
        "up to 8 where that shortens the busiest rank's time; for stages whose largest matrix has "
        f"more work than a rank's share; {_OURS}; default auto on a GPU, off on a CPU, with "
        "--deterministic-mode and with --muon-log-interval",
        type=_ranks_that_share,
        metavar="auto|off|RANKS",
    ),
    _flag(
        "--muon-rank-tflops",
        "speed of Newton-Schulz on a rank, in TFLOP/s, for the choice of homes; a run never "
        f"measures it, megatron-muon bench speeds does; {_OURS}; default "
        f"{_MOONLIGHT.rank_tflops:g}, an assumption for an H100",
        type=float,
    ),
    _flag(
        "--muon-link-gbytes",
        "speed of the exchange, in GB/s (10^9 bytes) that a rank sends and as many that it "
        "receives, for the choice of homes; a run never measures it, megatron-muon bench speeds "
        f"does; {_OURS}; default {_MOONLIGHT.link_gbytes:g}, an assumption for a 400 Gbit/s port "
        "per rank",
        type=float,
    ),
    _flag(
        "--muon-node-ranks",
        "ranks of a node, or of another group with fast links; ranks that share a matrix are of "
        f"one node; a run never measures it; {_OURS}; default {_MOONLIGHT.node_ranks}",
        type=int,
        metavar="RANKS",
    ),
    _flag(
        "--muon-dp-layout",
        "how grad buffers are cut into shards with --overlap-grad-reduce: contiguous, the fewest "
        "buckets that keep the overlap (unless --ddp-num-buckets or --ddp-bucket-size is given) "
        "and, from core 0.18 on, an order in which shards cut few parameters; or bucketed, "
        f"Megatron's own; without the overlap a buffer is one bucket; {_OURS}; default contiguous",
        choices=("contiguous", "bucketed"),
    ),
    _flag(
        "--muon-early-param-gather",
        "with --overlap-param-gather, start the first all-gather of parameters within the step, as "
        "soon as they are updated, and not in the next forward pass; the result is the same; "
        "nothing may change parameters between a step and the forward pass, so not with "
        f"--qk-clip; {_OURS}; default: the forward pass starts it",
        **_ON,
    ),
    _flag(
        "--muon-round-mib",
        "cap on a rank's buffers for one round of the exchange, in MiB; while one round is "
        f"orthogonalized, its neighbours travel; {_OURS}; default 0: three times the buffers of "
        "the largest parameter, at least 256",
        type=int,
    ),
    _flag(
        "--muon-ns-dtype",
        f"dtype that matrices are orthogonalized in; auto: {AUTO_NS_DTYPE}; pieces travel in bf16, "
        f"or in fp32 with fp32; {_OURS} ({_PAPER} has bf16); default auto",
        choices=("auto", *get_args(NsDtype)),
    ),
    _flag(
        "--muon-ns-coefficients",
        f"polynomials of the Newton-Schulz iteration: a published set ({', '.join(SETS)}), or "
        "numbers: a,b,c for every step, or a,b,c;a,b,c;... one triple per step; "
        f"{_OURS}; default simple, the set of {_PAPER}",
        metavar="NAME|NUMBERS",
    ),
    _flag(
        "--muon-ns-iteration",
        "how the polynomials are computed: standard, gram (on the short side's Gram matrix, with "
        "less work where a matrix is not square) or auto, by shape; gram's rounding error is up to "
        f"twice standard's in bf16 and fp16, up to 3 times in fp32; {_OURS}; default auto on a GPU "
        "where restarts are known for the coefficients, steps and dtype, else standard",
        choices=get_args(NsIteration),
    ),
    _flag(
        "--muon-ns-batch",
        "most matrices of one shape that a GPU orthogonalizes at once; auto: as many as 1.5 times "
        "the largest matrix's memory holds, or 512 MiB if that is more; unless it is 1, results "
        "depend on the layout; no effect on a CPU or with --deterministic-mode; megatron-muon "
        f"bench newton-schulz --batch measures it; {_OURS}; default auto, which is 0",
        type=auto_or_number,
        metavar="NUMBER|auto",
    ),
    _flag(
        "--muon-elementwise",
        "kernels of momentum, norm and update on a GPU: auto (fused ones where triton is "
        "installed) or foreach (torch's operations), with the same results bit for bit but for the "
        "order in which a norm's squares are added; "
        f"{_OURS}; default {_MOONLIGHT.elementwise}",
        choices=get_args(ElementwiseBy),
    ),
    _flag(
        "--muon-from-adamw",
        "how an AdamW checkpoint is loaded: momentum (Muon's momentum starts as "
        "exp_avg / (1 - β1)), fresh (at zero) or refuse; no effect on a Muon checkpoint; "
        f"{_OURS}; default refuse",
        choices=("momentum", "fresh", "refuse"),
    ),
    _flag(
        "--adamw-from-muon",
        "with --optimizer adam, load a Muon checkpoint: Adam's moments and step count start at "
        f"zero for Muon's parameters; no effect on an AdamW checkpoint; {_OURS}; default: a Muon "
        "checkpoint is refused",
        **_ON,
    ),
    _flag(
        "--no-muon-checkpoint-digest",
        "neither write nor check the digest of a checkpoint (size and checksum of its files, its "
        f"parameters); {_OURS}; default: it is written and checked",
        **_ON,
    ),
    _flag(
        "--muon-log-interval",
        "steps between two logging steps, which write each matrix's update, weight, momentum and "
        "direction in a few numbers to --muon-log-file, TensorBoard and W&B; no effect on the "
        "training, but that a GPU shares no matrices (--muon-split-matrices off); megatron-muon "
        f"watch shows them; {_OURS}; default: never",
        type=int,
        metavar="STEPS",
    ),
    _flag(
        "--muon-log-file",
        "file of JSON lines that --muon-log-interval appends to, written by the last rank; "
        f"{_OURS}; default muon_watch.jsonl in the folder of --tensorboard-dir, else of --save",
        metavar="PATH",
    ),
    _flag(
        "--muon-cpu",
        "hide the GPUs and run on the CPU over gloo; options that need a GPU are replaced, and "
        f"each replacement is printed; with any optimizer; {_OURS}; default: the CPU only where "
        "there is no GPU",
        **_ON,
    ),
    _flag(
        "--muon-trace-steps",
        "steps to trace with torch's profiler, FIRST:LAST, both included, or one number; with any "
        f"optimizer; {_OURS}; default: none",
        metavar="FIRST:LAST",
    ),
    _flag(
        "--muon-trace-dir",
        "folder for the traces of --muon-trace-steps, one file for each rank; megatron-muon trace "
        f"report reads it; {_OURS}; default traces",
        metavar="FOLDER",
    ),
    _flag(
        "--muon-defaults",
        f"defaults of flags that are not given: moonlight ({_PAPER}) or upstream (this Megatron's "
        f"own Muon); {_OURS}; default moonlight",
        choices=("moonlight", "upstream"),
    ),
    _flag(
        "--muon-backend",
        "implementation of --optimizer muon: plugin (megatron_muon) or upstream (Megatron's "
        f"own Muon, to which everything is left); {_OURS}; default plugin",
        choices=("plugin", "upstream"),
    ),
)

# Dests of the flags that a run with any optimizer may have.
OF_ANY = ("muon_cpu", "muon_trace_steps", "muon_trace_dir")
