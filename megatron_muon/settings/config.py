"""The settings of Distributed Muon, one row each, checked when they are made."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from megatron_muon.settings import left
from megatron_muon.settings.coefficients import (
    SETS,
    Restarts,
    canonical,
    default_steps,
    require_bounded,
    require_whole,
    set_of,
)
from megatron_muon.settings.kinds import SplitKind as SplitKind
from megatron_muon.settings.patterns import (
    PatternSettings,
    canonical_texts,
    fields_of,
    pairs_of,
)
from megatron_muon.settings.rows import rows_of
from megatron_muon.settings.rules import RULES, row_of
from megatron_muon.settings.run import HomePolicy as HomePolicy
from megatron_muon.settings.run import RunSettings
from megatron_muon.settings.run import SplitMatrices as SplitMatrices
from megatron_muon.settings.update import NsIteration as NsIteration
from megatron_muon.settings.update import UpdateSettings


class _Signature:
    """What ``inspect`` and ``help`` show: ``__init__``'s parameters with their types.

    Without it they would show ``MuonConfig.__new__``, which takes any keyword.
    """

    def __get__(self, instance: object, owner: type[Any]) -> inspect.Signature:
        _, *parameters = inspect.signature(owner.__init__).parameters.values()
        types = get_type_hints(owner)
        return inspect.Signature(
            [each.replace(annotation=types[each.name]) for each in parameters]
        )


@dataclass(frozen=True, kw_only=True)
class MuonConfig(RunSettings, PatternSettings, UpdateSettings):
    """Settings of the Muon part of a run; the defaults are Moonlight's (arXiv
    2502.16982).

    docs/flags.md says more of each, as ``--help`` does. Here patterns are tuples,
    ``splits``, ``lr_mults``, ``wd_mults`` and ``radii`` are tuples of pairs,
    ``by_pattern`` maps patterns to settings, or has texts as its flag, ``round_bytes``
    is in bytes, and ``ns_coefficients`` may be a set's name, one triple for every step
    or a tuple of triples. Without ``ns_steps`` there are 5 steps, or 10 with
    deepseekv4, which needs all of them. A list becomes a tuple. None leaves a choice to
    the device or turns a feature off. lr and weight decay are not here, but in
    ``by_pattern``: they come from Megatron's parameter groups, step by step.

    Attributes:
        matched_adamw_rms: Root mean square of a matrix's update, per unit of lr (arXiv
            2502.16982, eq. 4). Default: 0.2.
        scale_mode: Factor on a direction: sqrt(max(rows, cols)) with spectral,
            sqrt(rows / cols) with unit_rms_norm, sqrt(max(1, rows / cols)) with
            shape_scaling. Default: 'spectral'.
        rule: What a direction does to its matrix. muon: a decayed step. hyperball: a
            step on the sphere of the matrix's own norm, lr being its length in radii,
            without weight decay and without a scale (MuonH, arXiv 2606.16899). normuon:
            muon's step of a direction whose rows, or columns where it is wide, are each
            divided by the root of a second moment (NorMuon, arXiv 2510.05491). namo:
            muon's step and decay, times the norm of the momentum over the root of a
            second moment of the gradient's norm (NAMO, arXiv 2602.17080). Default:
            'muon'.
        radii: With rule hyperball, the Frobenius norm of the matrices whose names match
            a pattern, of each head or expert that is orthogonalized alone. Default: ().
        moment2_beta2: With a rule that has second moments, beta2 in v <- beta2 v + (1 -
            beta2) X^2, at least 0 and below 1. Default: 0.95.
        moment2_eps: With a rule that has second moments, what is added to the root of
            one. Default: 1e-08.
        full_period: Steps from one full orthogonalization to the next, by Adam's number
            of steps: a new run's first is full. Default: 1.
        block_lr_mult: Factor on the learning rate of all of Muon's matrices, also where
            TP cuts none, in the steps that full_period leaves between full ones.
            Default: 1.0.
        momentum: mu in M <- mu M + G (arXiv 2502.16982, eq. 1), at least 0 and below 1.
            Default: 0.95.
        momentum_warmup: Steps in which mu rises on a line from momentum_start to
            momentum, by Adam's number of steps: it goes on after a resume. Default:
            None.
        momentum_start: mu of the first step of momentum_warmup, at most momentum.
            Default: 0.85.
        momentum_dtype: Muon's momentum in memory. int8: one byte an element, in blocks
            of 256 with an fp32 scale each (arXiv 2509.23106); where a shard's edge cuts
            a block, bits depend on the layout. Default: 'fp32'.
        nesterov: False: orthogonalize the momentum M. Default: True.
        ns_steps: Newton-Schulz iterations for each matrix, 1 to 100 (arXiv 2502.16982,
            section 2.2). Default: 5.
        ns_coefficients: Polynomials of the Newton-Schulz iteration: a published set
            (simple, quintic, polar_express, deepseekv4) or numbers. Default: 'simple'.
        preset: Defaults of two settings. safe: ns_dtype bf16 and ns_iteration standard,
            as in published runs. fast: on a GPU fp16 and auto. Default: 'safe'.
        ns_iteration: How the polynomials are computed. standard: on the matrix. gram:
            on the short side's Gram matrix, with less work where a matrix is not square
            and some more rounding. auto: by shape. Default: None.
        ns_dtype: Dtype that matrices are orthogonalized in. None: bf16; fp16 on a GPU
            with preset fast. Default: None.
        ns_batch: Most matrices of one shape that a GPU orthogonalizes at once. None: as
            many as 1.5 times the largest matrix's memory holds, or 512 MiB if that is
            more. Default: None.
        elementwise: Kernels of momentum and update on a GPU. auto: fused ones where
            triton is installed. foreach: torch's operations, if the fused ones fail
            their check at start. Default: 'auto'.
        symmetric_products: Who makes the products of Newton-Schulz whose result is
            symmetric, on a GPU in bf16 or fp16. auto: quack-kernels where it is
            installed (Hopper and newer), else torch. triton: a kernel of this package,
            which computes half of them, on every GPU that triton supports;
            docs/performance.md has its speed. torch: whole products. Default: 'auto'.
        clip_scope: Gradients that --clip-grad scales and whose norm decides. all: every
            parameter's, as in Megatron. adamw: those of AdamW's parameters; Megatron
            then logs their norm. Default: 'all'.
        weight_decay_all_params: Decay norms' gammas and biases, too (arXiv 2502.16982,
            appendix D, for long runs). Default: False.
        cautious_decay: Decay an element of Muon's matrices only where the update moves
            it toward zero or not at all (Cautious Weight Decay, arXiv 2510.12402).
            Default: False.
        independent_decay: Decay Muon's matrices by the weight decay times lr / max_lr a
            step, not times lr: it follows the schedule, and not the size of the rate.
            Default: False.
        lr_mults: Multiply the learning rate of the parameters whose names match a
            pattern, Muon's and AdamW's. Default: ().
        wd_mults: The same as lr_mults for the weight decay. Default: ().
        qk_clip: Threshold of attention logits. Default: None.
        qk_clip_alpha: The queries' share of the clip of qk_clip, above 0 and below 1.
            Default: 0.5.
        by_pattern: Settings of the parameters whose names match a pattern. Default: ().
        split_qkv: False: orthogonalize a fused QKV weight as one matrix. Default: True.
        splits: Matrices of the weights whose names match a pattern. whole: one. qkv: of
            fused attention, and of MLA's linear_kv_up_proj. heads: of the same, and of
            q. gate-up: of a gated linear_fc1. parts: of MLA's down-projections, and of
            the in_proj of a Mamba mixer or a gated delta net. rows:A,B, cols:A,A,
            heads:N and groups:N:A,B split any weight by numbers of the whole one.
            Default: ().
        muon_include: Give the parameters whose names match a pattern (*, ?, []) to
            Muon, whatever the routing says. Default: ().
        muon_exclude: Give the parameters whose names match a pattern to AdamW, whatever
            the routing says. Default: ().
        homes: Choice of the rank that orthogonalizes a matrix. Default: 'balanced'.
        split_matrices: Number of ranks that orthogonalize a long or a large matrix
            together, each a strip of it. auto: up to 8, where that shortens the busiest
            rank's time. Default: None.
        node_ranks: Ranks of a node, or of another group with fast links. Default: 8.
        round_bytes: Cap on a rank's buffers for one round of the exchange, in bytes.
            Default: None.
        checkpoint_digest: False: neither write nor check the digest of a checkpoint:
            size and checksum of its files, and Muon's matrices. Default: True.
        nonfinite_limit: End the run once so many lines of the log in a row
            (--log-interval) name a matrix whose direction was not finite. Default: 3.
        log_interval: Steps from one logging step to the next. Default: None.

    Raises:
        TypeError: a setting is of the wrong kind, or there is none of that name.
        ValueError: a setting is out of its range, not finite or not one of its choices,
            or the coefficients make directions that are not finite.
    """

    # The settings that were written out; those unlike their default where all were, by
    # ``replace``.
    given: ClassVar[frozenset[str]]

    __signature__ = _Signature()

    if not TYPE_CHECKING:  # tools that read the source take the dataclass's __init__

        def __new__(cls, **given: Any) -> MuonConfig:
            made = super().__new__(cls)
            defaults = {each.name: each.default for each in fields(cls)}
            object.__setattr__(made, "given", _given(given, defaults))
            return made

    def __post_init__(self) -> None:
        for name, setting in ROWS.items():
            object.__setattr__(self, name, _in_tuples(getattr(self, name)))
            setting.require(getattr(self, name))
        object.__setattr__(self, "ns_coefficients", canonical(self.ns_coefficients))
        object.__setattr__(self, "by_pattern", canonical_texts(self.by_pattern))
        if "ns_steps" not in self.given:
            object.__setattr__(self, "ns_steps", default_steps(self.ns_coefficients))
        require_whole(self.ns_coefficients, self.ns_steps)
        for dtype in (self.ns_dtype,) if self.ns_dtype else ("bf16", "fp16"):
            require_bounded(self.ns_coefficients, self.ns_steps, dtype)
        if self.ns_iteration == "gram":
            _require_restarts(self)
        _require_log(self)
        _require_parts(self)
        _require_rule(self)
        if self.momentum_warmup and self.momentum_start > self.momentum:
            raise ValueError(
                f"{named('momentum_start')} {self.momentum_start} is above "
                f"{named('momentum')} {self.momentum}: give a lower one, since a "
                "warm-up raises it"
            )
        if self.symmetric_products == "triton" and self.ns_dtype == "fp32":
            raise ValueError(
                f"{named('symmetric_products')} triton multiplies bf16 and fp16, and "
                f"{named('ns_dtype')} is fp32. Use only one of the two"
            )
        for text in self.by_pattern:
            _require_pattern(self, text)

    def where(self, settings: str) -> MuonConfig:
        """The settings of a matrix that has some of its own, ``KEY=VALUE,...``.

        Steps that the run's coefficients have by default are not the matrix's: it has
        those of its own coefficients.

        Raises:
            ValueError: as for settings of a run.
        """
        own = fields_of(settings)
        given = {name: getattr(self, name) for name in self.given - {"by_pattern"}}
        # ``replace`` passes every field on, so steps in ``given`` may be a default
        if self.ns_steps == default_steps(self.ns_coefficients):
            given.pop("ns_steps", None)
        return MuonConfig(**{**given, **own})

    @property
    def changed(self) -> list[str]:
        """The settings that are unlike their defaults."""
        return [n for n, row in ROWS.items() if getattr(self, n) != row.default]

    @property
    def patterns(self) -> dict[str, str]:
        """The patterns of names in all settings, each with its setting and flag. Each
        must match a parameter.

        Those of ``by_pattern`` have their settings behind them.
        """
        found: dict[str, str] = {}
        for name in _WITH_PATTERNS:
            for each in getattr(self, name):
                pattern = each if isinstance(each, str) else each[0]
                found.setdefault(pattern, named(name))
        return found


# splits first: they match Muon's alone
_WITH_PATTERNS = (
    "splits",
    "radii",
    "lr_mults",
    "wd_mults",
    "by_pattern",
    "muon_include",
    "muon_exclude",
)
ROWS = rows_of(MuonConfig)


def _given(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> frozenset[str]:
    """The settings that were written out; a TypeError for an unknown name."""
    for name in given.keys() - defaults.keys():
        if name in left.FIELDS:
            raise TypeError(f"MuonConfig's {name} was removed: {left.FIELDS[name]}")
        close = " or ".join(map(repr, get_close_matches(name, defaults, 2)))
        hint = f"; did you mean {close}?" if close else ""
        raise TypeError(f"MuonConfig has no setting {name!r}{hint}")
    if len(given) < len(defaults):
        return frozenset(given)
    return frozenset(name for name, value in given.items() if value != defaults[name])


def _in_tuples(value: Any) -> Any:
    """A value in which lists, also those of Hydra, are tuples."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(map(_in_tuples, value))
    return value


def named(field: str) -> str:
    """A setting in a message: its field with its flag."""
    return ROWS[field].named


# the way out of what Muon cannot do, in Python and on a command line
USE_ADAMW = "choose optimizer='adam' (--optimizer adam)"


def _needed(lists: Restarts, config: MuonConfig) -> tuple[object, ...]:
    """The restarts that a run may need: a CPU without bf16 instructions has fp32
    squares.
    """
    if config.ns_dtype is None:  # as the device decides
        return lists.fp16, lists.bf16, lists.fp32_squares
    own = getattr(lists, config.ns_dtype)
    return own, own if config.ns_dtype == "fp32" else lists.fp32_squares


def _require_rule(config: MuonConfig) -> None:
    """Settings must be of the rule, or of all."""
    row = row_of(config.rule)
    if not row.shares and config.split_matrices not in (None, "off"):
        raise ValueError(
            f"{named('split_matrices')} {config.split_matrices!r} with {named('rule')} "
            f"{config.rule}: a rule of one's own gets whole matrices, so none is "
            "shared: leave it out"
        )
    if row.scales and config.scale_mode not in row.scales:
        raise ValueError(
            f"{named('scale_mode')} {config.scale_mode} does not suit {named('rule')} "
            f"{config.rule}: give one of {', '.join(row.scales)}"
        )
    for name in config.changed:
        rules = [rule for rule, one in RULES.items() if name in one.settings]
        if rules and config.rule not in rules:
            raise ValueError(
                f"{named(name)} is of {named('rule')} {' or '.join(rules)}, and the "
                f"rule is {config.rule}: give such a rule, or leave it out"
            )
        if name in row.refuses:
            raise ValueError(
                f"{named(name)} has no meaning with {named('rule')} {config.rule}, "
                f"{row.refuses[name]}: leave it out"
            )


def _require_pattern(config: MuonConfig, text: str) -> None:
    """Settings by pattern must be possible beside those of the run."""
    ((_, settings),) = pairs_of((text,))
    try:
        config.where(settings)
    except ValueError as error:
        raise ValueError(f"{named('by_pattern')} {text}: {error}") from error


def _require_restarts(config: MuonConfig) -> None:
    name, steps = config.ns_coefficients, config.ns_steps
    lists = set_of(name).restarts.get(steps)
    if lists is not None and None not in _needed(lists, config):
        return
    known = []
    for other, coefficients in SETS.items():
        counts = [
            s
            for s, lists in coefficients.restarts.items()
            if None not in _needed(lists, config)
        ]
        if counts:
            known.append(f"{other} with {', '.join(map(str, counts))}")
    raise ValueError(
        f"{named('ns_iteration')} 'gram': the Gram iteration has not been found "
        f"accurate with {named('ns_coefficients')} {name!r}, {named('ns_steps')} "
        f"{steps}, {named('ns_dtype')} {config.ns_dtype or 'bf16 and fp16'!r}: take "
        f"{named('ns_iteration')} 'auto' or 'standard', or what gram has been tested "
        f"with: {'; '.join(known)} steps"
    )


def _require_log(config: MuonConfig) -> None:
    """Logging steps need whole matrices."""
    for name in ("split_matrices", "full_period"):
        value = getattr(config, name)
        if config.log_interval is not None and value not in (None, "off", 1):
            raise NotImplementedError(
                f"{named(name)} {value!r} with {named('log_interval')}: the numbers of "
                "parts of a matrix are not logged yet; use only one of the two"
            )


# settings of another one, without which they have no effect
_PARTS = {"momentum_start": "momentum_warmup", "block_lr_mult": "full_period"}


def _require_parts(config: MuonConfig) -> None:
    """A part of a setting needs that setting."""
    for part, of in _PARTS.items():
        if part in config.changed and of not in config.changed:
            raise ValueError(
                f"{named(part)} {getattr(config, part)} is of {named(of)}, and there "
                f"is none: give {of}, too, or leave this out"
            )
