"""Every flag of Muon's with its help. See flags for what they mean."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from megatron_muon.coefficients import SETS, NsDtype
from megatron_muon.config import ElementwiseBy, MuonConfig, NsIteration, ScaleMode

_PAPER = "arXiv 2502.16982"
_UPSTREAMS = "Megatron's own Muon flag"


class Flag(NamedTuple):
    """A flag that ``add_flags`` sees to.

    Attributes:
        option: with its dashes.
        help: its meaning, unit, source, default.
        keywords: those of ``add_argument``; where Megatron has the flag, its own are kept.
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
    """A whole number, or ``auto``, which is 0."""
    return 0 if text == "auto" else int(text)


_MOONLIGHT = MuonConfig()
_ON = {"action": "store_true"}
FLAGS = (
    _flag(
        "--muon-matched-adamw-rms",
        f"root mean square of a matrix's update, per unit of lr ({_PAPER}, eq. 4, where AdamW's "
        "updates have 0.2 to 0.4): AdamW's rate is then one to start from, seldom the best, see "
        f"docs/switching_and_tuning.md; default {_MOONLIGHT.matched_adamw_rms}",
        type=float,
    ),
    _flag(
        "--muon-momentum",
        f"μ in M ← μM + G, no unit ({_PAPER}, Algorithm 1); default {_MOONLIGHT.momentum}; "
        "Megatron's own Muon: 0.9",
        type=float,
    ),
    _flag(
        "--muon-ns-steps",
        f"Newton-Schulz iterations, a number ({_PAPER}, section 2.1); "
        f"default {_MOONLIGHT.ns_steps}",
        type=int,
    ),
    _flag(
        "--no-muon-nesterov",
        f"orthogonalize M in place of G + μM ({_PAPER} has Nesterov's); a switch; default: G + μM",
        **_ON,
    ),
    _flag(
        "--muon-num-ns-steps",
        f"the same as --muon-ns-steps, a number of iterations; {_UPSTREAMS}; "
        f"default {_MOONLIGHT.ns_steps}, Megatron's own Muon: 5",
        type=int,
    ),
    _flag(
        "--muon-nesterov",
        f"orthogonalize G + μM; a switch; {_UPSTREAMS} since core 0.18; default: so too, "
        "--no-muon-nesterov asks for M; Megatron's own Muon: M",
        **_ON,
    ),
    _flag(
        "--muon-use-nesterov",
        f"the same as --muon-nesterov; a switch; {_UPSTREAMS} in core 0.16 and 0.17; default: so "
        "too",
        **_ON,
    ),
    _flag(
        "--muon-scale-mode",
        "what a direction is multiplied by, times the extra factor, no unit: sqrt(max(rows, "
        "cols)), sqrt(rows / cols) or sqrt(max(1, rows / cols)), where rows are outputs "
        f"(Emerging-Optimizers' get_muon_scale_factor); {_UPSTREAMS}; default "
        f"{_MOONLIGHT.scale_mode}",
        choices=get_args(ScaleMode),
    ),
    _flag(
        "--muon-extra-scale-factor",
        "factor on the scale mode's, no unit; with spectral it is the update's root mean square, "
        f"--muon-matched-adamw-rms; {_UPSTREAMS}; default {_MOONLIGHT.matched_adamw_rms} with "
        "spectral, which is Moonlight's mode, 1.0 with another; Megatron's own Muon: 1.0",
        type=float,
    ),
    _flag(
        "--muon-coefficient-type",
        "polynomials of the Newton-Schulz iteration, a name of Emerging-Optimizers, the same as "
        f"--muon-ns-coefficients; {_UPSTREAMS}; default simple, Megatron's own Muon: quintic",
    ),
    _flag(
        "--muon-fp32-matmul-prec",
        "precision of Newton-Schulz's products, a name of torch.set_float32_matmul_precision; "
        "only medium, which Emerging-Optimizers runs in bf16: --muon-ns-dtype bf16; "
        f"{_UPSTREAMS}; default medium",
        choices=("low", "medium", "high"),
    ),
    _flag(
        "--muon-no-split-qkv",
        "orthogonalize a fused QKV weight as one matrix; a switch; "
        f"{_UPSTREAMS}; default: Q, K and V apart",
        action="store_false",
        dest="muon_split_qkv",
    ),
    _flag(
        "--muon-tp-mode",
        "how a matrix that TP splits is orthogonalized, a name: here once and whole, at its home, "
        "with duplicated's result; another mode is an error unless TP is 1; "
        f"{_UPSTREAMS}; default duplicated, Megatron's own Muon: blockwise up to core 0.19",
        choices=("blockwise", "duplicated", "distributed"),
    ),
    _flag(
        "--muon-scalar-optimizer",
        "who updates what is not Muon's, a name; only adam (with decoupled weight decay, as "
        f"{_PAPER}); {_UPSTREAMS}; default adam",
        choices=("adam", "lion"),
    ),
    _flag(
        "--muon-use-syrk",
        "Triton's symmetric product in Newton-Schulz; a switch; not here: an error; "
        f"{_UPSTREAMS} after core 0.19; default: torch's products",
        **_ON,
    ),
    _flag(
        "--weight-decay-all-params",
        f"decay norms' gammas and biases too ({_PAPER}, appendix D); a switch; with --optimizer "
        "adam, too, the AdamW twin of such a run; megatron_muon's; default: they are not decayed",
        **_ON,
    ),
    _flag(
        "--muon-include",
        "parameters that are Muon's whatever the routing says, a pattern of names (*, ?, []; "
        "megatron-muon routes prints the names); may be given several times; "
        "megatron_muon's; default none",
        action="append",
        metavar="PATTERN",
    ),
    _flag(
        "--muon-exclude",
        "parameters that are AdamW's whatever the routing says, a pattern of names, as in "
        "--muon-include; may be given several times; megatron_muon's; default none",
        action="append",
        metavar="PATTERN",
    ),
    _flag(
        "--muon-homes",
        "which rank orthogonalizes a matrix, a name: balanced work, or local, fewest bytes; "
        f"megatron_muon's; default {_MOONLIGHT.homes}",
        choices=("balanced", "local"),
    ),
    _flag(
        "--muon-rank-tflops",
        "speed of Newton-Schulz on a rank, in TFLOP/s: what its work costs where homes are chosen; "
        "megatron-muon bench speeds measures it, a run never does; megatron_muon's; default "
        f"{_MOONLIGHT.rank_tflops:g}, taken for an H100",
        type=float,
    ),
    _flag(
        "--muon-link-gbytes",
        "speed of the exchange, in GB/s (10^9 bytes) that a rank sends and receives: what bytes "
        "cost where homes are chosen; megatron-muon bench speeds measures it, a run never does; "
        f"megatron_muon's; default {_MOONLIGHT.link_gbytes:g}, taken for a 400 Gbit/s port a rank",
        type=float,
    ),
    _flag(
        "--muon-dp-layout",
        "how grad buffers are cut into shards where --overlap-grad-reduce is on, a name: "
        "contiguous, in the fewest buckets that keep the overlap, unless --ddp-num-buckets or "
        "--ddp-bucket-size says how many, and from core 0.18 on in an order in which few "
        "parameters are cut; or bucketed, as Megatron itself does; without the overlap a buffer is "
        "one bucket; megatron_muon's; default contiguous",
        choices=("contiguous", "bucketed"),
    ),
    _flag(
        "--muon-round-mib",
        "most of matrices and pieces that a rank has in one round of the exchange, in MiB; while "
        "one round is orthogonalized its neighbours travel; megatron_muon's; default 0: 256, or "
        "three times what the largest parameter has, if that is more",
        type=int,
    ),
    _flag(
        "--muon-ns-dtype",
        "dtype that matrices are orthogonalized in; they travel in bf16, with fp32 in fp32; "
        f"megatron_muon's, {_PAPER} has bf16; default {_MOONLIGHT.ns_dtype}",
        choices=get_args(NsDtype),
    ),
    _flag(
        "--muon-ns-coefficients",
        f"polynomials of the Newton-Schulz iteration: a published set ({', '.join(SETS)}) or "
        "numbers, a,b,c for every step or a,b,c;a,b,c;... one after the other; megatron_muon's; "
        f"default simple, which is {_PAPER}'s",
        metavar="NAME|NUMBERS",
    ),
    _flag(
        "--muon-ns-iteration",
        "how the polynomials are computed, a name: standard, gram (of the short side's square, "
        "less work where a matrix is not square) or auto, by shape; gram's rounding error is up to "
        "twice standard's in bf16 and fp16 and 3 times in fp32; megatron_muon's; default auto on a "
        "GPU where its restarts are known for coefficients, steps and dtype, else standard",
        choices=get_args(NsIteration),
    ),
    _flag(
        "--muon-ns-batch",
        "most matrices of one shape that a GPU orthogonalizes at once, a number; or auto: as many "
        "as 1.5 times the largest matrix's memory holds, or 512 MiB if that is more; but for 1, "
        "results depend on the layout; no effect on a CPU or with --deterministic-mode; "
        "megatron-muon bench newton-schulz --batch measures it; megatron_muon's; default auto, as "
        "a number 0",
        type=auto_or_number,
        metavar="NUMBER|auto",
    ),
    _flag(
        "--muon-elementwise",
        "who does momentum and update on a GPU, a name: auto (one fused kernel each where triton "
        "is installed) or foreach (torch's operations on lists); the same bits come out; "
        f"megatron_muon's; default {_MOONLIGHT.elementwise}",
        choices=get_args(ElementwiseBy),
    ),
    _flag(
        "--muon-from-adamw",
        "how a checkpoint of AdamW's is loaded, a name: momentum (Muon's momentum starts as "
        "exp_avg / (1 - β1)), fresh (at zero) or refuse; without effect on one of Muon's; "
        "megatron_muon's; default refuse",
        choices=("momentum", "fresh", "refuse"),
    ),
    _flag(
        "--adamw-from-muon",
        "for --optimizer adam: load a checkpoint of Muon's, with Adam's moments and count of steps "
        "at zero for what Muon had; a switch; without effect on one of AdamW's; megatron_muon's; "
        "default: such a checkpoint is refused",
        **_ON,
    ),
    _flag(
        "--no-muon-checkpoint-digest",
        "neither write nor check the digest of a checkpoint (size and checksum of its files, its "
        "parameters); a switch; megatron_muon's; default: it is written and checked",
        **_ON,
    ),
    _flag(
        "--muon-cpu",
        "run on the CPU over gloo, as by itself where there is no GPU, and hide the GPUs that are "
        "here: what only a GPU has is replaced, and each replacement printed; a switch; with any "
        "optimizer; megatron_muon's; default: the CPU only where there is no GPU",
        **_ON,
    ),
    _flag(
        "--muon-defaults",
        f"whose defaults what is not given has, a name: moonlight ({_PAPER}) or upstream, those of "
        "this Megatron's own Muon; megatron_muon's; default moonlight",
        choices=("moonlight", "upstream"),
    ),
    _flag(
        "--muon-backend",
        "who runs --optimizer muon, a name: plugin, or upstream, which leaves everything to "
        "Megatron's own Muon; megatron_muon's; default plugin",
        choices=("plugin", "upstream"),
    ),
)
