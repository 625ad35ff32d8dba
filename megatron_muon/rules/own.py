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
from megatron_muon.settings.config import ROWS, MuonConfig, named
from megatron_muon.settings.patterns import pairs_of
from megatron_muon.settings.rules import RULES, OwnRule, own_rule

# by more than a product in bf16 rounds: of a batch and of one matrix
_DIFFERS = 0.1
_SHAPE = 32, 48  # of the matrices whose directions ranks compare
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


def tried(numerics: Numerics, device: torch.device) -> str:
    """Try the run's rule on small matrices. No communication.

    Returns:
        A line that all ranks must agree on: the rule's name, and of a function the norm
        of a seeded matrix's direction, and its product with another one.

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
    first, second = _drawn(2, _SHAPE)
    together = _directions(own, torch.stack([0 * first, first, second]), device, says)
    alone = _directions(own, first[None], device, says)[0]
    if (together[1] - alone).norm() > _DIFFERS * alone.norm():
        raise ValueError(
            f"{says} returns other directions for several matrices than for each "
            'alone: give a function of each, or OwnRule(..., takes="matrix")'
        )
    numbers = alone.norm(), (alone * second).sum()
    norm, product = (f"{float(number):.3g}" for number in numbers)
    return f"result of rule {name} on a seeded matrix: norm {norm}, product {product}"


def try_shapes(
    numerics: Numerics, parameters: Sequence[Parameter], device: torch.device
) -> None:
    """Try the run's function on matrices of each shape that it gets of these
    parameters, also in block steps. No communication.

    Raises:
        ValueError: as of ``tried``.
    """
    own = own_rule(numerics.config.rule)
    assert own is not None
    if isinstance(own.direction, type):
        return
    every = list(parameters)
    if numerics.config.full_period > 1:
        every += map(in_tp_slices, parameters)
    shapes: set[tuple[int, int]] = set()
    for parameter in every:
        shapes.update(matrix.unit for matrix in parameter.matrices)
    for shape in sorted(shapes):
        (drawn,) = _drawn(1, shape)
        pair = torch.stack([0 * drawn, drawn])
        _directions(own, pair, device, f"{named('rule')} {numerics.config.rule}")


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
        if getattr(config, field) != ROWS[field].default
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
        if any(getattr(one, field) != ROWS[field].default for one in configs):
            raise ValueError(
                f"{named(field)} has no meaning with {says}, a function in its place: "
                "leave it out"
            )


def _drawn(count: int, shape: tuple[int, int]) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _directions(
    own: OwnRule, matrices: Tensor, device: torch.device, says: str
) -> Tensor:
    """The directions of matrices on the device, times their scale."""
    count, rows, cols = matrices.shape
    on = f"{says} on {count} matrices {rows} x {cols}"
    try:
        scale = 1.0 if own.scale is None else own.scale(rows, cols)
        with _host_reads_refused(own, device):
            found = applied(own, matrices.to(device))
    except Exception as error:  # of any type: it is the user's code
        way_out = ""
        if "does not require grad" in str(error):
            way_out = (
                "; steps run without grad mode: take gradients within "
                "torch.enable_grad(), of x.detach().requires_grad_()"
            )
        text = f"{on}: {type(error).__name__}: {error}{way_out}"
        raise ValueError(text) from error
    if not found.isfinite().all():
        raise ValueError(f"{on} returns NaN or Inf")
    if not 0 < scale < math.inf:
        raise ValueError(
            f"{says}: its scale of {rows} x {cols} is {scale}, not above 0"
        )
    return found * scale


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
    except RuntimeError as error:
        if "synchroniz" not in str(error):  # CUDA's, of torch's debug mode
            raise
        text = f"{error}: declare it by OwnRule(..., reads_host=True)"
        raise RuntimeError(text) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
