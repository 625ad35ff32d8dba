"""Rules of one's own (``settings.rules.OwnRule``): a function of whole matrices in
place of Newton-Schulz.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_muon.orthogonalize.matmul import TORCH_DTYPE
from megatron_muon.orthogonalize.normalization import Soundness, largest_of
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.layout import Parameter
from megatron_muon.planning.rounds.table import Stack
from megatron_muon.rules.block_steps import in_tp_slices
from megatron_muon.rules.muon import MOMENTUM_KEY, Muon, MuonRound, units_of
from megatron_muon.runtime.rule import Rule
from megatron_muon.settings.config import MuonConfig, named
from megatron_muon.settings.patterns import pairs_of
from megatron_muon.settings.rules import RULES, OwnRule, own_rule

_SHAPE = 32, 48  # of the matrix whose direction ranks compare
# The way out of an error that a function raises, by words in the error's text.
_WAYS_OUT = {
    "does not require grad": "steps run without grad mode: take gradients within "
    "torch.enable_grad(), of x.detach().requires_grad_()",
    "synchroniz": "declare it by OwnRule(..., reads_host=True)",  # torch's debug mode
}
# settings of what a function replaces, and of what its scale does
_REPLACED = ("ns_steps", "ns_coefficients", "ns_iteration", "symmetric_products")
_SCALES = ("matched_adamw_rms", "scale_mode", "block_lr_mult")
# settings that Muon's class carries out, as it does update_norm
_OF_MUON = ("log_interval", "cautious_decay", "momentum_warmup")


def make(numerics: Numerics, *others: Any) -> Rule:
    """The run's rule; arguments are as of ``Muon``."""
    own = own_rule(numerics.config.rule)
    assert own is not None
    if isinstance(own.direction, type):
        made: Rule = own.direction(numerics, *others)
        return made
    return OwnMuon(own, numerics, *others)


class OwnMuon(Muon):
    """Muon with a function of one's own in place of Newton-Schulz."""

    def __init__(self, rule: OwnRule, *of_muon: Any) -> None:
        super().__init__(*of_muon)
        self.rule = rule
        self.flops = (0,) * len(self.plan.matrices)
        if rule.scale is not None:
            self.scales = [rule.scale(*matrix.whole) for matrix in self.plan.matrices]

    @property
    def kind_of_round(self) -> type[OwnRound]:
        """See ``Muon``."""
        return OwnRound


class OwnRound(MuonRound):
    """Its work in one round on one rank."""

    _muon: OwnMuon

    def _orthogonalize_batch(
        self, stack: Stack, staged: Tensor, moves: Tensor, soundness: Soundness
    ) -> None:
        """See ``MuonRound``. A matrix that is not finite, or has no gradient, reaches
        the function as zero.
        """
        out = staged.view(TORCH_DTYPE[self._numerics.dtype])
        sources = units_of(staged, stack.layout)
        targets = units_of(out, stack.layout)
        units = Soundness()
        for source, target in zip(sources, targets, strict=True):
            matrices = source.flatten(2).to(torch.float32, copy=True)
            sound = largest_of(matrices.flatten(1)).isfinite()
            acts = (sound & moves).view(-1, 1, 1)
            found = applied(self._muon.rule, matrices.masked_fill_(~acts, 0.0))
            rounded = found.masked_fill(~acts, 0.0).to(target.dtype)
            target.copy_(rounded.view(target.shape))
            unsound = torch.where(sound, 0.0, math.nan)
            units.norms.append(unsound)
            units.lines.append(largest_of(rounded.flatten(1)) + unsound)
        soundness.of_units(units)


def applied(own: OwnRule, matrices: Tensor) -> Tensor:
    """The directions of matrices, ``(b, rows, cols)`` fp32.

    Raises:
        RuntimeError: the function calls ``sys.exit``.
        ValueError: it returns another shape or dtype.
    """
    assert not isinstance(own.direction, type)
    try:
        if own.takes == "batch":
            return _checked(own.direction(matrices), matrices)
        return torch.stack([_checked(own.direction(one), one) for one in matrices])
    except SystemExit as error:  # it would end the rank without a word
        raise RuntimeError(f"it calls sys.exit({error.code!r})") from error


def _checked(found: Any, matrices: Tensor) -> Tensor:
    wanted = tuple(matrices.shape), matrices.dtype, matrices.device
    is_tensor = isinstance(found, Tensor)
    got = (tuple(found.shape), found.dtype, found.device) if is_tensor else found
    if got != wanted:
        raise ValueError(f"it takes {_text(wanted)} and returns {_text(got)}")
    assert isinstance(found, Tensor)
    return found


def _text(what: Any) -> str:
    return " ".join(map(str, what)) if isinstance(what, tuple) else repr(what)


# --- before the first step ------------------------------------------------------------


def tried(
    numerics: Numerics, parameters: Sequence[Parameter], device: torch.device
) -> str:
    """Try the run's rule on a seeded matrix of each shape that it gets of these
    parameters, also in block steps. No communication.

    Returns:
        A line that all ranks must agree on: the rule's class, or a function's result on
        one seeded matrix.

    Raises:
        ValueError: it does not import, fails, returns another shape, dtype, NaN or Inf,
            reads on the host of a GPU and does not declare it, or a setting has no
            meaning with it.
    """
    name = numerics.config.rule
    own = own_rule(name)
    assert own is not None
    says = f"{named('rule')} {name}"
    if isinstance(own.direction, type):
        _require_rule(own.direction, numerics.config, says)
        made = own.direction
        return f"class of rule {name}: {made.__module__}.{made.__qualname__}"
    _require_settings(own, numerics.config, says)
    every = list(parameters)
    if numerics.config.full_period > 1:
        every += map(in_tp_slices, parameters)
    shapes: set[tuple[int, int]] = set()
    for parameter in every:
        shapes.update(matrix.unit for matrix in parameter.matrices)
    result = _result(own, _SHAPE, device, says)
    for shape in sorted(shapes):
        _result(own, shape, device, says)
    return f"result of rule {name} on a seeded matrix: {result:.3g}"


def _require_rule(made: type[Any], config: MuonConfig, says: str) -> None:
    if not issubclass(made, Rule):
        raise ValueError(
            f"{says}: {made.__name__} is no megatron_muon.runtime.rule.Rule"
        )
    # by names, so that no rule's module is imported
    bases = {f"{base.__module__}:{base.__qualname__}" for base in made.__mro__}
    for name, row in RULES.items():
        if row.settings and row.location in bases:
            raise ValueError(
                f"{says} is a subclass of {name}'s, whose {', '.join(row.settings)} "
                f"only {named('rule')} {name} has: give that, or subclass Muon"
            )
    states = {*made.state_keys} - {MOMENTUM_KEY}
    if states:
        raise ValueError(
            f"{says} keeps {', '.join(sorted(states))} of each shard, and checkpoints "
            f"have only {MOMENTUM_KEY}"
        )
    if issubclass(made, Muon):
        return
    given = [
        f"{named(field)} {getattr(config, field)}"
        for field in _OF_MUON
        if field in config.changed
    ]
    if any(each.scale_mode == "update_norm" for each in _configs(config)):
        given.append(f"{named('scale_mode')} update_norm")
    if given:
        raise ValueError(
            f"{', '.join(given)}: this is of Muon's subclasses alone, and {says} is "
            "none: leave it out"
        )


def _configs(config: MuonConfig) -> list[MuonConfig]:
    """The run's settings, and those of each pattern."""
    patterns = pairs_of(config.by_pattern)
    return [config, *(config.where(settings) for _, settings in patterns)]


def _require_settings(own: OwnRule, config: MuonConfig, says: str) -> None:
    """Settings of what the function replaces must not be given."""
    configs = _configs(config)
    for field in _REPLACED if own.scale is None else _REPLACED + _SCALES:
        if any(field in one.changed for one in configs):
            raise ValueError(
                f"{named(field)} has no meaning with {says}, a function in its place: "
                "leave it out"
            )


@torch.no_grad()
def _result(
    own: OwnRule, shape: tuple[int, int], device: torch.device, says: str
) -> float:
    """Call the function with two matrices, zeros and a seeded one, on the device.

    Returns:
        The sum of the seeded one's direction times its scale, weighted by random
        numbers, so that another direction gives another sum.

    Raises:
        ValueError: see ``tried``.
    """
    rows, cols = shape
    drawn = torch.randn(2, rows, cols, generator=torch.Generator().manual_seed(0))
    matrix, weights = drawn.to(device)
    on = f"{says} on 2 matrices {rows} x {cols}"
    try:
        scale = 1.0 if own.scale is None else own.scale(rows, cols)
        with _host_reads_refused(own, device):
            zero, direction = applied(own, torch.stack([0 * matrix, matrix]))
    except Exception as error:  # of any type: it is the user's code
        text = f"{on}: {type(error).__name__}: {error}"
        for cause, way_out in _WAYS_OUT.items():
            if cause in str(error):
                text += f"; {way_out}"
        raise ValueError(text) from error
    if not (zero.isfinite().all() and direction.isfinite().all()):
        raise ValueError(f"{on} returns NaN or Inf")
    if not 0 < scale < math.inf:
        raise ValueError(
            f"{says}: its scale of {rows} x {cols} is {scale}, not above 0"
        )
    return float((direction * weights).sum() * scale)


@contextmanager
def _host_reads_refused(own: OwnRule, device: torch.device) -> Iterator[None]:
    """Within it a read by the host of a GPU is an error, unless the rule declares
    it.
    """
    if own.reads_host or device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
