"""The settings of Distributed Muon, validated when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from megatron_muon.settings.coefficients import (
    SETS,
    Given,
    NsDtype,
    Restarts,
    canonical,
    require_bounded,
    restarts_of,
)
from megatron_muon.settings.names import named

NsIteration = Literal["standard", "gram", "auto"]
HomePolicy = Literal["balanced", "local"]
ClipScope = Literal["all", "adamw"]
ElementwiseBy = Literal["auto", "foreach"]
EarlyParamGather = Literal["auto", "on", "off"]
ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]
SplitMatrices = int | Literal["auto", "off"]
SplitKind = Literal["whole", "qkv", "heads", "gate-up", "parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonConfig:
    """Settings of the Muon part of a run; the defaults are Moonlight's (arXiv 2502.16982).

    lr and weight decay are not here: they come from Megatron's parameter groups, step by step.

    Attributes:
        matched_adamw_rms: root mean square of every matrix's update, per unit of lr. The direction
            is multiplied by ``matched_adamw_rms * sqrt(max(rows, cols))`` of the whole matrix
            (eq. 4). In the paper AdamW's updates have 0.2 to 0.4, so AdamW's lr is one to start
            from, but seldom the best (docs/switching_and_tuning.md). With another ``scale_mode``,
            this is only a factor.
        scale_mode: scale of a direction, which ``matched_adamw_rms`` multiplies, by the names of
            NVIDIA's Emerging-Optimizers; rows are a matrix's outputs, cols its inputs.
            ``spectral``: sqrt(max(rows, cols)), Moonlight's; ``unit_rms_norm``: sqrt(rows / cols);
            ``shape_scaling``: sqrt(max(1, rows / cols)).
        momentum: μ in M ← μM + G (Algorithm 1).
        nesterov: orthogonalize G + μM in place of M.
        ns_steps: Newton-Schulz iterations, at most 100; the paper found 10 no better than 5.
        ns_coefficients: (a, b, c) of each step's X ← aX + (bA + cA²)X with A = XXᵀ: the name of a
            published set (``coefficients``), one triple for every step, or a tuple of triples,
            which starts over if ``ns_steps`` is larger.
        ns_iteration: ``standard``; or ``gram``, the same polynomials of the short side's square,
            which is less work unless a matrix is square; or ``auto``, by shape. ``coefficients``
            lists the sets and numbers of steps for which gram is known to be accurate, and how far
            (``GRAM_ERROR``); with others gram is refused, and auto is ``standard``. None: ``auto``
            on a GPU, ``standard`` on a CPU (``Numerics.iteration``).
        ns_dtype: the dtype of Newton-Schulz. Matrices travel in bf16 (in fp32 with fp32). Products
            accumulate in fp32 and round once; fp32 is never TF32. On CUDA, parts of a sum may be
            added in 16 bits where
            ``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`` or its fp16
            counterpart is set, as both are by default. fp16 rounds eight times as finely as bf16,
            but entries below 2e-10 of a matrix's norm become zero. No scale overflows it: a matrix
            is normalised first and held with norm 128. It needs no loss scale. None: fp16 on a GPU,
            bf16 on a CPU (``Numerics.dtype``).
        ns_batch: most matrices of one shape that a home orthogonalizes together, on CUDA and in one
            round; a single small one leaves most of a GPU idle. None: as many as fit into scratch
            memory of 1.5 × the largest matrix, or of 512 MiB in 16 bits if that is more. A batch's
            products may round otherwise than one matrix's. So with any value but 1 the last bits
            depend on the layout; torch's deterministic mode takes one at a time. No effect on CPU.
        elementwise: how momentum, norm and update are computed. ``auto``: by fused kernels on CUDA
            where triton is installed, else by torch's operations; ``foreach``: always by these.
            Both make the same bits, but for the order in which a norm's squares are added.
        clip_scope: whose gradients Megatron's clip (``clip_grad``) scales, and whose norm decides:
            ``all``, as in Megatron, or ``adamw``: AdamW's only. Muon's gradients then stay as they
            are; they still must be finite.
        weight_decay_all_params: decay all parameters, also RMSNorm gammas, biases and others with a
            ``wd_mult`` of 0. Off, as in Megatron; the paper (appendix D) recommends it for long
            runs. It holds for ``optimizer='adam'`` as well, so that Muon and AdamW are compared
            with the same decay.
        split_qkv: orthogonalize the Q, K and V parts of a fused QKV weight as three matrices. Off:
            as one, unless ``splits`` say otherwise.
        splits: ``(pattern, kind)`` pairs: the matrices of the weights whose names match, each
            with its own scale; the last pair that matches counts. ``whole``: one matrix; ``qkv``:
            the q, k and v (and gate) of a fused attention, the k and v of multi-latent attention's
            ``linear_kv_up_proj``; ``heads``: one per head of those, and of q; ``gate-up``: the two
            halves of a gated ``linear_fc1``; ``parts``: latents and rope key of multi-latent
            attention's down-projections, and the parts of the ``in_proj`` of a Mamba mixer or a
            gated delta net. Patterns are like those of ``muon_include``.
        lr_mults, wd_mults: ``(pattern, factor)`` pairs: the learning rate, and the weight
            decay, of parameters whose names match, Muon's and AdamW's, are multiplied by it; the
            last pair that matches counts. They become parameter groups of Megatron's, to which its
            scheduler gives their values.
        qk_clip: threshold of attention logits. After a step the query and key rows of a head whose
            largest logit passed it are scaled so that it would be the threshold (Kimi K2's QK-Clip,
            arXiv 2507.20534). None: off. It holds for ``optimizer='adam'`` as well. It is for
            Megatron's DotProductAttention, on every core; Megatron's own ``qk_clip`` (--qk-clip,
            core 0.16 on) is also for Transformer Engine's attention.
        qk_clip_alpha: the queries' share of the clip, in (0, 1); 0.5 is an equal share.
        muon_include, muon_exclude: patterns of parameter names (``fnmatch``: ``*``, ``?``, ``[]``)
            that overrule the routing. ``muon_include`` gives parameters to Muon (2-D weights only),
            ``muon_exclude`` to AdamW. Names are Megatron's, with layers numbered over all pipeline
            stages and experts as on the first EP rank; ``megatron-muon routes`` prints them.
        homes: the choice of the rank that orthogonalizes a matrix. ``balanced`` keeps the rank that
            holds most of it unless its work would pass 1.05 × max(ideal, largest matrix); up to
            1.10 × that, if another rank would end later (module ``homes``). ``local`` always keeps
            it.
        split_matrices: number of ranks that orthogonalize a long matrix together, each a strip of
            it; ``off``: none is shared. ``auto``: 2, 4 or 8 for the shapes with which the
            stage's step, by ``rank_tflops`` and ``link_gbytes``, takes 5 % less or better; not for
            matrices of less than 50 µs. A matrix is long if one side is at least twice the other,
            and no side may be shorter than the number of strips; experts' matrices are not shared.
            Of large matrices (``iteration.makes_rows``) homes make rows of each square, too, which
            they then put together; these are shared without being long. So one home does not keep
            others waiting, and no link takes a whole matrix. The homes are neighbours in the stage,
            so that they are of one node (``node_ranks``). Sums are made in one order, so bits
            depend on the number of strips and not on their ranks; they are other bits than without.
            None: ``auto`` on a GPU, but ``off`` in torch's deterministic mode, since the layout
            decides which matrices are shared, and with ``log_interval``; ``off`` on a CPU
            (``Numerics.split``).
        rank_tflops: speed of Newton-Schulz on a rank, 10¹² flop/s. Only homes depend on it. A run
            never measures it, so that every rank and every restart has the same homes;
            ``megatron-muon bench speeds`` does. 400 is an assumption for an H100 in 16 bits: 40 %
            of the 989 that its data sheet has for dense products.
        link_gbytes: speed of the exchange, 10⁹ bytes/s that a rank sends and as many that it
            receives. As with ``rank_tflops``, only homes depend on it, and no run measures it. 40
            is an assumption for a 400 Gbit/s port (50 GB/s) per rank.
        node_ranks: n, where ranks k·n to k·n + n - 1 of the world are of one node, whose links are
            several times as fast. Homes prefer ranks of their holder's node. More homes of one
            matrix than that, of which some must be on other nodes, make no rows of squares on a
            GPU. As with ``link_gbytes``, no run measures it; 8 is an assumption.
        round_bytes: cap on a rank's buffers for one round of the exchange; a single larger
            parameter may pass it. A step takes twice as much, in the three rounds that are under
            way, and the scratch memory of Newton-Schulz (``ns_batch``). None: three times the
            buffers of the largest parameter, at least 256 MiB, so that ranks seldom wait for each
            other's large matrices. Smaller rounds take less memory.
        align_shards: order parameters within Megatron's buckets so that shards cut few of them; for
            models that are wrapped in DDP after ``install``, and from core 0.18 on.
        early_param_gather: with Megatron's ``overlap_param_gather``, start the all-gather of a
            bucket of parameters as soon as the last of them is updated, and not in the forward
            pass. Bits are the same. ``auto``: in Megatron-LM's own training loop only, and not with
            clipped attention logits, Megatron's ``overlap_param_gather_with_optimizer_step`` or a
            CUDA graph of the full iteration. ``on``: in any loop, and an error with these. Between
            a step and the next forward pass such a loop must call ``start_param_sync(
            force_sync=True)`` of each model chunk before it reads or writes parameters.
        checkpoint_digest: write sizes and checksums of a checkpoint's files into its folder. Before
            a load, check them, and that the model is the same (``mcore.load_check.digest``).
        nonfinite_limit: a matrix whose direction is not finite is left where it was by that step,
            without decay, and the next line of the log names it. After so many lines in a row that
            name it, the run ends. One line may be a freak of the data; three mean that it does not
            learn, with Megatron's 100 steps between lines for 200 steps at least.
        log_interval: steps between two logging steps, which write what the matrices are like
            (module ``watching``) to ``log_file``; None: no step does. Shared matrices cannot be
            logged yet, so ``split_matrices`` must then be None or ``off``.
        log_file: path of the file of JSON lines that the last rank of the world appends to. It is
            given with ``log_interval``, and not without it.

    Raises:
        TypeError: a setting is of the wrong kind.
        ValueError: a setting is out of its range, not finite or not one of its choices, or the
            coefficients make directions that are not finite.
    """

    matched_adamw_rms: float = 0.2
    scale_mode: ScaleMode = "spectral"
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    ns_coefficients: Given = "simple"
    ns_iteration: NsIteration | None = None
    ns_dtype: NsDtype | None = None
    ns_batch: int | None = None
    elementwise: ElementwiseBy = "auto"
    clip_scope: ClipScope = "all"
    weight_decay_all_params: bool = False
    split_qkv: bool = True
    splits: tuple[tuple[str, SplitKind], ...] = ()
    lr_mults: tuple[tuple[str, float], ...] = ()
    wd_mults: tuple[tuple[str, float], ...] = ()
    qk_clip: float | None = None
    qk_clip_alpha: float = 0.5
    muon_include: tuple[str, ...] = ()
    muon_exclude: tuple[str, ...] = ()
    homes: HomePolicy = "balanced"
    split_matrices: SplitMatrices | None = None
    rank_tflops: float = 400.0
    link_gbytes: float = 40.0
    node_ranks: int = 8
    round_bytes: int | None = None
    align_shards: bool = False
    early_param_gather: EarlyParamGather = "auto"
    checkpoint_digest: bool = True
    nonfinite_limit: int = 3
    log_interval: int | None = None
    log_file: str | None = None

    def __post_init__(self) -> None:
        for name in ("matched_adamw_rms", "rank_tflops", "link_gbytes"):
            _require_positive(name, getattr(self, name))
        _require_choice("scale_mode", self.scale_mode, get_args(ScaleMode))
        _require_number("momentum", self.momentum)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"{named('momentum')} must be in [0, 1), got {self.momentum}")
        _require_count("ns_steps", self.ns_steps, _MOST_STEPS)
        object.__setattr__(self, "ns_coefficients", canonical(self.ns_coefficients))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{named(name)} must be True or False, got {getattr(self, name)!r}")
        if self.ns_dtype is not None:
            _require_choice("ns_dtype", self.ns_dtype, get_args(NsDtype))
        if self.ns_iteration is not None:
            _require_choice("ns_iteration", self.ns_iteration, get_args(NsIteration))
        _require_choice("elementwise", self.elementwise, get_args(ElementwiseBy))
        _require_choice("early_param_gather", self.early_param_gather, get_args(EarlyParamGather))
        for dtype in (self.ns_dtype,) if self.ns_dtype else ("bf16", "fp16"):
            require_bounded(self.ns_coefficients, self.ns_steps, dtype)
        if self.ns_iteration == "gram":
            _require_restarts(self)
        _require_clip(self.qk_clip, self.qk_clip_alpha)
        for name in ("muon_include", "muon_exclude"):
            _require_patterns(name, getattr(self, name))
        _require_splits(self.splits)
        for name in ("lr_mults", "wd_mults"):
            _require_multipliers(name, getattr(self, name))
        _require_choice("clip_scope", self.clip_scope, get_args(ClipScope))
        _require_choice("homes", self.homes, ("balanced", "local"))
        for name in ("node_ranks", "nonfinite_limit"):
            _require_count(name, getattr(self, name))
        for name in ("ns_batch", "round_bytes", "log_interval"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name))
        if self.split_matrices not in (None, "off"):
            _require_strips(self.split_matrices, self.log_interval)
        _require_log(self.log_interval, self.log_file)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of names in all settings. Each must match a parameter."""
        pairs = (*self.splits, *self.lr_mults, *self.wd_mults)
        return (*self.muon_include, *self.muon_exclude, *(pattern for pattern, _ in pairs))

    def setting_of(self, pattern: str) -> str:
        """The setting that has one of ``patterns``, named with its flag."""
        for name in ("splits", "lr_mults", "wd_mults"):  # splits first: they match Muon's alone
            if any(pattern == other for other, _ in getattr(self, name)):
                return named(name)
        return named("muon_include" if pattern in self.muon_include else "muon_exclude")


# Speeds, factors and thresholds: within these no product of a plan or a step leaves its range.
_LEAST, _MOST = 1e-9, 1e9
_MOST_STRIPS = 64  # beyond, squares are all of the work
_MOST_STEPS = 100  # singular values settle long before; a schedule has a triple for each step
_SWITCHES = (
    "nesterov",
    "weight_decay_all_params",
    "split_qkv",
    "align_shards",
    "checkpoint_digest",
)


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{named(name)} must be a number, got {value!r}")


def _require_positive(name: str, value: float) -> None:
    _require_number(name, value)
    if not _LEAST <= value <= _MOST:
        raise ValueError(f"{named(name)} must be from {_LEAST:g} to {_MOST:g}, got {value}")


def _require_clip(threshold: float | None, alpha: float) -> None:
    if threshold is not None:
        _require_positive("qk_clip", threshold)
    _require_number("qk_clip_alpha", alpha)
    if not 0 < alpha < 1:
        raise ValueError(f"{named('qk_clip_alpha')} must be in (0, 1), got {alpha}")


def _require_count(name: str, value: object, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{named(name)} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{named(name)} must be at least 1, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{named(name)} must be at most {most}, got {value}")


def _needed(lists: Restarts, config: MuonConfig) -> tuple[object, ...]:
    """The restarts that a run may need: a CPU without bf16 instructions has fp32 squares."""
    if config.ns_dtype is None:  # as the device decides
        return lists.fp16, lists.bf16, lists.fp32_squares
    own = getattr(lists, config.ns_dtype)
    return own, own if config.ns_dtype == "fp32" else lists.fp32_squares


def _require_restarts(config: MuonConfig) -> None:
    name, steps = config.ns_coefficients, config.ns_steps
    lists = restarts_of(name, steps)
    if lists is not None and None not in _needed(lists, config):
        return
    known = []
    for other, coefficients in SETS.items():
        counts = [
            s for s, lists in coefficients.restarts.items() if None not in _needed(lists, config)
        ]
        known += [f"{other} with {', '.join(map(str, counts))}"] if counts else []
    raise ValueError(
        f"{named('ns_iteration')} 'gram': the Gram iteration has not been found accurate with "
        f"{named('ns_coefficients')} {name!r}, {named('ns_steps')} {steps}, {named('ns_dtype')} "
        f"{config.ns_dtype or 'bf16 and fp16'!r}: take {named('ns_iteration')} 'auto' or "
        f"'standard', or what gram has been tested with: {'; '.join(known)} steps"
    )


def _require_strips(asked: object, interval: int | None) -> None:
    if asked != "auto":
        _require_count("split_matrices", asked, _MOST_STRIPS)
        if asked == 1:
            raise ValueError(f"{named('split_matrices')} must be at least 2, got 1")
    if interval is not None:
        raise NotImplementedError(
            f"{named('split_matrices')} {asked!r} with {named('log_interval')}: the numbers of a "
            "matrix that several ranks share are not computed yet; leave one of them out"
        )


def _require_log(interval: int | None, file: object) -> None:
    if file is not None and not isinstance(file, str):
        raise TypeError(f"{named('log_file')} must be a path as a text, got {file!r}")
    if file is not None and (not file.strip() or "\0" in file):
        raise ValueError(f"{named('log_file')} must be a path, got {file!r}")
    if (interval is None) != (file is None):
        raise ValueError(
            f"{named('log_interval')} {interval!r} with {named('log_file')} {file!r}: give both, "
            "the steps between two lines and the file that takes them, or neither"
        )


def _require_patterns(name: str, value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(pattern, str) for pattern in value):
        raise TypeError(f"{named(name)} must be a tuple of patterns, got {value!r}")


def _require_splits(value: object) -> None:
    for kind in _seconds("splits", value, "kind"):
        if not isinstance(kind, str):
            raise TypeError(f"{named('splits')}: a kind is a text, got {kind!r}")
        _require_choice("splits", kind, get_args(SplitKind))


def _require_multipliers(name: str, value: object) -> None:
    for multiplier in _seconds(name, value, "multiplier"):
        _require_number(name, multiplier)
        if not 0 <= multiplier <= _MOST:
            raise ValueError(
                f"{named(name)}: a multiplier is from 0 to {_MOST:g}, got {multiplier}"
            )


def _seconds(name: str, value: object, second: str) -> list[Any]:
    """What a tuple of pairs has beside the patterns."""
    pairs = isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    )
    if not pairs:
        raise TypeError(f"{named(name)} must be a tuple of (pattern, {second}), got {value!r}")
    return [pair[1] for pair in value]  # type: ignore[attr-defined]


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{named(name)} must be one of {', '.join(choices)}, got {value!r}")
