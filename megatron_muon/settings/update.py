"""Settings of the update: what becomes of a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_muon.settings import kinds
from megatron_muon.settings.coefficients import (
    DEFAULT_STEPS,
    SETS,
    Given,
    NsDtype,
    canonical,
    parse,
    spelled,
)
from megatron_muon.settings.rows import CONCEPT, UPSTREAM, Flag, row
from megatron_muon.settings.rules import ScaleMode, help_text, require_name

NsIteration = Literal["standard", "gram", "auto"]
ClipScope = Literal["all", "adamw"]
ElementwiseBy = Literal["auto", "foreach"]
MomentumDtype = Literal["fp32", "int8"]
Preset = Literal["safe", "fast"]
SymmetricProducts = Literal["auto", "triton", "torch"]

PAPER = "arXiv 2502.16982"
# singular values settle long before; a schedule has a triple for each step
MOST_STEPS = 100


def _check(name: str, value: object) -> None:
    canonical(value)


_COEFFICIENTS = kinds.Kind(_check, metavar="NAME|NUMBERS", read=parse, write=spelled)
_SET = kinds.Kind(
    _check,
    # numbers: the other flag's
    read=lambda name: None if name == "custom" else canonical(name),
    write=lambda value: name if isinstance(name := canonical(value), str) else "custom",
)
_STEPS = f"The default is {DEFAULT_STEPS}, and with deepseekv4 the 10 that it has."
_FACTORS = kinds.pairs("factor", kinds.MULTIPLIER)
_DTYPES = kinds.choice(get_args(MomentumDtype))


def _check_dtype(name: str, value: object) -> None:
    if value == "bf16":
        raise ValueError(
            f"{name} bf16 was removed: give int8, which is smaller, or with "
            "Transformer Engine --use-precision-aware-optimizer --exp-avg-dtype bf16"
        )
    _DTYPES.check(name, value)


# without choices, so that argparse leaves the check to the setting's own
_MOMENTUM_DTYPE = kinds.Kind(_check_dtype, metavar="|".join(_DTYPES.choices))
_BELOW_ONE = kinds.number("in [0, 1)", lambda value: 0 <= value < 1)


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """Momentum, Newton-Schulz, scale, decay and clips; ``MuonConfig`` has all
    settings.
    """

    matched_adamw_rms: float = row(
        0.2,
        "--muon-matched-adamw-rms",
        f"Root mean square of a matrix's update, per unit of lr ({PAPER}, eq. 4). "
        "AdamW's updates have 0.2 to 0.4, so AdamW's lr is one to start from, but "
        "seldom the best: see docs/switching_and_tuning.md. Raise it to raise the "
        "matrices' rate alone.",
        kinds.POSITIVE,
        source=CONCEPT,
        aliases=(
            Flag(
                "--muon-extra-scale-factor",
                "Factor on a direction, beside the scale mode's. With spectral and "
                "update_norm it is the same as --muon-matched-adamw-rms.",
                kinds.POSITIVE,
                source=UPSTREAM,
                without="The default is 0.2 with these two (Moonlight's modes), 1.0 "
                "with the others (Megatron's own Muon: 1.0).",
            ),
        ),
    )
    scale_mode: ScaleMode = row(
        "spectral",
        "--muon-scale-mode",
        "Factor on a direction: sqrt(max(rows, cols)) with spectral, sqrt(rows / cols) "
        "with unit_rms_norm, sqrt(max(1, rows / cols)) with shape_scaling. Rows are a "
        "matrix's outputs. The extra factor multiplies it. The formulas are those of "
        "Emerging-Optimizers' get_muon_scale_factor. update_norm is spectral on "
        "directions that have been given the norm of an orthogonal matrix: the root "
        f"mean square of each update is then exact ({PAPER}, eq. 6).",
        kinds.choice(get_args(ScaleMode)),
        source=UPSTREAM,
    )
    rule: str = row(
        "muon",
        "--muon-rule",
        f"What a direction does to its matrix. {help_text()}. A function of one's own, "
        "in place of Newton-Schulz, has the name MODULE:NAME or that of "
        "megatron_muon.register_rule. docs/rules.md has formulas, and writes one.",
        kinds.Kind(require_name, metavar="RULE|MODULE:NAME"),
    )
    radii: tuple[tuple[str, float], ...] = row(
        (),
        "--muon-radius",
        "With --muon-rule hyperball, the Frobenius norm of the matrices whose names "
        "match a pattern, of each head or expert that is orthogonalized alone. The "
        "first step brings them there. May be given several times; the last pattern "
        "that matches counts.",
        kinds.pairs("radius", kinds.POSITIVE),
        without="The default is the norm at the first step with this rule.",
    )
    moment2_beta2: float = row(
        0.95,
        "--muon-moment2-beta2",
        "With a rule that has second moments, beta2 in v <- beta2 v + (1 - beta2) X^2, "
        "at least 0 and below 1.",
        _BELOW_ONE,
    )
    moment2_eps: float = row(
        1e-8,
        "--muon-moment2-eps",
        "With a rule that has second moments, what is added to the root of one.",
        kinds.number("in [1e-16, 1]", lambda value: 1e-16 <= value <= 1),
    )
    full_period: int = row(
        1,
        "--muon-full-period",
        "Steps from one full orthogonalization to the next, by Adam's number of steps: "
        "a new run's first is full. Between, each TP rank's slice of a matrix is "
        "orthogonalized by itself, with the slice's own sizes in its scale, as in the "
        "blockwise mode of Megatron's own Muon (MuonBP, arXiv 2510.16981). It is other "
        "mathematics, for less traffic and work with TP.",
        kinds.count("STEPS"),
    )
    block_lr_mult: float = row(
        1.0,
        "--muon-block-lr-mult",
        "Factor on the learning rate of all of Muon's matrices, also where TP cuts "
        "none, in the steps that --muon-full-period leaves between full ones. The "
        "decay keeps its rate.",
        kinds.POSITIVE,
    )
    momentum: float = row(
        0.95,
        "--muon-momentum",
        f"mu in M <- mu M + G ({PAPER}, eq. 1), at least 0 and below 1.",
        _BELOW_ONE,
        source=UPSTREAM,
        without="The default is 0.95 (Megatron's own Muon: 0.9).",
    )
    momentum_warmup: int | None = row(
        None,
        "--muon-momentum-warmup",
        "Steps in which mu rises on a line from --muon-momentum-start to "
        "--muon-momentum, by Adam's number of steps: it goes on after a resume.",
        kinds.count("STEPS").or_none(),
        without="By default mu is constant.",
    )
    momentum_start: float = row(
        0.85,
        "--muon-momentum-start",
        "mu of the first step of --muon-momentum-warmup, at most --muon-momentum.",
        _BELOW_ONE,
    )
    momentum_dtype: MomentumDtype = row(
        "fp32",
        "--muon-momentum-dtype",
        "Muon's momentum in memory. int8: one byte an element, in blocks of 256 with "
        "an fp32 scale each (arXiv 2509.23106); where a shard's edge cuts a block, "
        "bits depend on the layout. Newton-Schulz gets it before it is rounded. "
        "Checkpoints hold fp32, and load with either. With "
        "--use-precision-aware-optimizer give --exp-avg-dtype.",
        _MOMENTUM_DTYPE,
    )
    nesterov: bool = row(
        True,
        "--no-muon-nesterov",
        "Orthogonalize the momentum M.",
        kinds.OFF_SWITCH,
        source=CONCEPT,
        without=f"The default is Nesterov's form in {PAPER}, G + mu M.",
        aliases=(
            Flag(
                "--muon-nesterov",
                "Orthogonalize G + mu M. Megatron has this flag from core 0.18 on.",
                kinds.SWITCH,
                source=UPSTREAM,
                without="It is the default (Megatron's own Muon: M); "
                "--no-muon-nesterov turns it off.",
            ),
            Flag(
                "--muon-use-nesterov",
                "The same as --muon-nesterov. Megatron has this flag in core 0.16 and "
                "0.17.",
                kinds.SWITCH,
                source=UPSTREAM,
                without="It is the default.",
            ),
        ),
    )
    ns_steps: int = row(
        DEFAULT_STEPS,
        "--muon-ns-steps",
        f"Newton-Schulz iterations for each matrix, 1 to 100 ({PAPER}, section 2.2). "
        "The paper found 10 no better than 5.",
        kinds.count(most=MOST_STEPS),
        source=CONCEPT,
        without=_STEPS,
        aliases=(
            Flag(
                "--muon-num-ns-steps",
                "The same as --muon-ns-steps.",
                kinds.count(most=MOST_STEPS),
                source=UPSTREAM,
                without=_STEPS,
            ),
        ),
    )
    ns_coefficients: Given = row(
        "simple",
        "--muon-ns-coefficients",
        "Polynomials of the Newton-Schulz iteration: a published set "
        f"({', '.join(SETS)}) or numbers. a,b,c is for every step; a,b,c;a,b,c;... has "
        "one triple for each step. See docs/coefficients.md.",
        _COEFFICIENTS,
        without=f"The default is simple, the set of {PAPER}.",
        aliases=(
            Flag(
                "--muon-coefficient-type",
                "Polynomials of the Newton-Schulz iteration, by Emerging-Optimizers' "
                "name: the same as --muon-ns-coefficients.",
                _SET,
                source=UPSTREAM,
                without="The default is simple (Megatron's own Muon: quintic).",
            ),
        ),
    )
    preset: Preset = row(
        "safe",
        "--muon-preset",
        "Defaults of two flags. safe: --muon-ns-dtype bf16 and --muon-ns-iteration "
        "standard, as in published runs. fast: on a GPU fp16 and auto. Each flag can "
        "be given alone. docs/performance.md has both prices.",
        kinds.choice(get_args(Preset)),
    )
    ns_iteration: NsIteration | None = row(
        None,
        "--muon-ns-iteration",
        "How the polynomials are computed. standard: on the matrix. gram: on the short "
        "side's Gram matrix, with less work where a matrix is not square and some more "
        "rounding. auto: by shape. docs/coefficients.md has the error, and the "
        "coefficients, steps and dtypes for which gram is known to be accurate. With "
        "others gram is an error, and auto is standard.",
        kinds.choice(get_args(NsIteration)).or_none(),
        without="The default is standard; auto on a GPU with --muon-preset fast.",
    )
    ns_dtype: NsDtype | None = row(
        None,
        "--muon-ns-dtype",
        "Dtype that matrices are orthogonalized in. auto: bf16; fp16 on a GPU with "
        "--muon-preset fast. Slices travel in bf16; with fp32, in fp32. A matrix is "
        "normalised first, so no scale overflows fp16. In fp16 entries below 2e-10 of "
        f"a matrix's norm become zero. fp32 is never TF32. {PAPER} has bf16.",
        kinds.choice_or_auto(get_args(NsDtype)),
        without="The default is auto.",
    )
    ns_batch: int | None = row(
        None,
        "--muon-ns-batch",
        "Most matrices of one shape that a GPU orthogonalizes at once. auto: as many "
        "as 1.5 times the largest matrix's memory holds, or 512 MiB if that is more. "
        "Unless it is 1, last bits depend on the layout. It has no effect on a CPU or "
        "with --deterministic-mode. megatron-muon bench newton-schulz --batch measures "
        "it.",
        kinds.count_or_zero("NUMBER|auto", word="auto"),
        without="The default is auto (0).",
    )
    elementwise: ElementwiseBy = row(
        "auto",
        "--muon-elementwise",
        "Kernels of momentum and update on a GPU. auto: fused ones where triton is "
        "installed. foreach: torch's operations, if the fused ones fail their check at "
        "start. Both give the same bits.",
        kinds.choice(get_args(ElementwiseBy)),
    )
    symmetric_products: SymmetricProducts = row(
        "auto",
        "--muon-symmetric-products",
        "Who makes the products of Newton-Schulz whose result is symmetric, on a GPU "
        "in bf16 or fp16. auto: quack-kernels where it is installed (Hopper and "
        "newer), else torch. triton: a kernel of this package, which computes half of "
        "them, on every GPU that triton supports; docs/performance.md has its speed. "
        "torch: whole products. A kernel is tried at the start of a run. Sides are "
        "multiples of 8, and rows 6,144 or more (quack-kernels), 264 or more (triton).",
        kinds.choice(get_args(SymmetricProducts)),
    )
    clip_scope: ClipScope = row(
        "all",
        "--muon-clip-scope",
        "Gradients that --clip-grad scales and whose norm decides. all: every "
        "parameter's, as in Megatron. adamw: those of AdamW's parameters; Megatron "
        "then logs their norm. Muon's still must be finite.",
        kinds.choice(get_args(ClipScope)),
    )
    weight_decay_all_params: bool = row(
        False,
        "--weight-decay-all-params",
        f"Decay norms' gammas and biases, too ({PAPER}, appendix D, for long runs). "
        "Give it with --optimizer adam as well, so that a run of AdamW has the same "
        "decay.",
        kinds.SWITCH,
        without="By default they are not decayed.",
        with_adamw="weight_decay_all_params",
    )
    cautious_decay: bool = row(
        False,
        "--muon-cautious-decay",
        "Decay an element of Muon's matrices only where the update moves it toward "
        "zero or not at all (Cautious Weight Decay, arXiv 2510.12402).",
        kinds.SWITCH,
        without="By default all are decayed.",
    )
    independent_decay: bool = row(
        False,
        "--muon-independent-decay",
        "Decay Muon's matrices by the weight decay times lr / max_lr a step, not times "
        "lr: it follows the schedule, and not the size of the rate. So it is a much "
        "smaller number than AdamW's: give it by --muon-wd-mult.",
        kinds.SWITCH,
        without="By default it is times lr.",
    )
    lr_mults: tuple[tuple[str, float], ...] = row(
        (),
        "--muon-lr-mult",
        "Multiply the learning rate of the parameters whose names match a pattern, "
        "Muon's and AdamW's. They become parameter groups of Megatron's. May be given "
        "several times; the last pattern that matches counts.",
        _FACTORS,
        without="The default is 1 for all.",
    )
    wd_mults: tuple[tuple[str, float], ...] = row(
        (),
        "--muon-wd-mult",
        "The same as --muon-lr-mult for the weight decay. A parameter that Megatron "
        "does not decay stays undecayed.",
        _FACTORS,
        without="The default is 1 for all.",
    )
    qk_clip: float | None = row(
        None,
        "--muon-qk-clip",
        "Threshold of attention logits. After a step the query and key rows of a head "
        "whose largest logit passed it are scaled so that it would be the threshold. "
        "This is QK-Clip of Kimi K2 (arXiv 2507.20534), which has 100. It needs "
        "Megatron's own attention (--transformer-impl local), on any core, and works "
        "with --optimizer adam, too. For Transformer Engine's use Megatron's "
        "--qk-clip, from core 0.16 on.",
        kinds.POSITIVE.or_none(),
        without="The default is no clip.",
        with_adamw="muon_qk_clip",
    )
    qk_clip_alpha: float = row(
        0.5,
        "--muon-qk-clip-alpha",
        "The queries' share of the clip of --muon-qk-clip, above 0 and below 1.",
        kinds.number("in (0, 1)", lambda value: 0 < value < 1),
        without="The default is 0.5, an equal share.",
        with_adamw="muon_qk_clip_alpha",
    )
