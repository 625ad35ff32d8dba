"""What a run says at its start, from its plans and choices.

``mcore.wiring.start`` prints it in one block once the optimizer is built;
``megatron-muon routes`` prints some of it without a run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from operator import add

from megatron_muon.orthogonalize.numerics import Device, Numerics, is_cuda
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.settings.coefficients import set_of, spelled
from megatron_muon.settings.config import USE_ADAMW, MuonConfig, named
from megatron_muon.settings.rules import OwnRule, own_rule
from megatron_muon.version import __version__

PREFIX = "[megatron_muon]"

# --- the model ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """Muon's share of a pipeline stage or a model: trainable elements, each once over
    all ranks.
    """

    total: int = 0  # total, muon: elements of all parameters, and of Muon's
    muon: int = 0
    # active, active_muon: elements that one token goes through: only as many of a
    # layer's routed experts as the router picks
    active: int = 0
    active_muon: int = 0
    # what AdamW's 2-D weights are, and their elements
    kept: list[tuple[str, int]] = field(default_factory=list)
    # what is unusual about weights, by name
    remarks: list[str] = field(default_factory=list)

    def __add__(self, other: Share) -> Share:
        return Share(*map(add, astuple(self), astuple(other)))


def share_lines(share: Share) -> list[str]:
    """Lines about a model: Muon's share, a warning where it is less than half, and the
    remarks.

    Raises:
        ValueError: the share is zero.
    """
    require_muons(share)
    all_of_it = _ratio(share.muon, share.total)
    activated = _ratio(share.active_muon, share.active)
    line = (
        f"Muon has {all_of_it:.1%} of the model's {amount(share.total)} trainable "
        "parameters"
    )
    if share.active < share.total:
        line += (
            f" and {activated:.1%} of the {amount(share.active)} that a token activates"
        )
    lines = [f"{line}, AdamW the rest"]
    if min(all_of_it, activated) < 0.5:
        lines.append(
            "warning: Muon updates less than half of the parameters; "
            f"{_kept(share)}: expect little difference from AdamW"
        )
    return [*lines, *dict.fromkeys(share.remarks)]


def require_muons(share: Share) -> None:
    """Refuse a model without any parameter of Muon's.

    Raises:
        ValueError: names what AdamW has.
    """
    if share.total and not share.muon:
        raise ValueError(
            f"Muon has none of the model's {amount(share.total)} trainable parameters; "
            f"{_kept(share)}. Give Muon some of these ({named('muon_include')}, "
            f"{named('muon_exclude')}), or {USE_ADAMW}"
        )


def _kept(share: Share) -> str:
    """What AdamW's 2-D weights are, by their part of the model, the largest first."""
    kept = Counter[str]()
    for what, elements in share.kept:
        kept[what] += elements
    if not kept:
        return "none is 2-D"
    parts = (f"{what}, {size / share.total:.1%}" for what, size in kept.most_common())
    return f"AdamW has the 2-D weights of {'; '.join(parts)}"


# --- the computation ------------------------------------------------------------------


def active_line(core: str, torch: str, config: MuonConfig) -> str:
    """This package's Muon runs, and not Megatron's own; what a report of a fault
    names.

    Args:
        core: the version of megatron-core.
        torch: the version of torch.
        config: the settings of the run.
    """
    return (
        f"megatron-muon {__version__} is active: Distributed Muon over the "
        f"DistributedOptimizer of megatron-core {core}; torch {torch}, preset "
        f"{config.preset}, rule {config.rule}"
    )


def computing_line(
    numerics: Numerics, products: str, elementwise: str, *, in_batches: bool
) -> str:
    """How a step is computed.

    Args:
        numerics: of the run.
        products: the library that makes the symmetric products.
        elementwise: the kernels of momentum and update.
        in_batches: whether matrices of one shape are orthogonalized together
            (``ns_batch``).
    """
    config = numerics.config
    own = own_rule(config.rule)
    if own is not None:
        return f"{own_rule_text(config.rule, own)}; momentum and update: {elementwise}"
    batches = ""
    if (config.ns_batch or 1) > 1 and not in_batches:
        batches = (
            f"; one matrix at a time, not {config.ns_batch}: a CPU and torch's "
            "deterministic mode take no batches"
        )
    steps = f"{config.ns_steps} steps"
    made_for = set_of(config.ns_coefficients).steps
    if made_for not in (0, config.ns_steps):
        steps += f" (made for {made_for})"
    return (
        f"Newton-Schulz: {spelled(config.ns_coefficients)}, {steps}, {numerics.dtype}, "
        f"iteration {iteration_text(numerics)}; symmetric products: {products}"
        f"{batches}; momentum and update: {elementwise}"
    )


def own_rule_text(name: str, own: OwnRule) -> str:
    """What is computed in place of Newton-Schulz, and what it costs."""
    kind = "a class" if isinstance(own.direction, type) else "a function, in fp32"
    waits = ""
    if own.reads_host:
        waits = f"; the host waits for the device at each {own.takes}"
    return f"rule {name}: {kind}; ranks share no matrix{waits}"


def iteration_text(numerics: Numerics) -> str:
    """The iteration's name, and why it is not the one that was asked for, or the
    preset's.
    """
    if numerics.iteration == numerics.wanted_iteration:
        return numerics.iteration
    return (
        "standard, since the Gram iteration has not been found accurate with these "
        "coefficients, steps and dtype"
    )


def not_shared_lines(
    config: MuonConfig, device: Device, *, is_deterministic: bool
) -> list[str]:
    """A line where a GPU does not take its default for ``split_matrices``, with the
    reason.
    """
    why = named("log_interval") if config.log_interval is not None else ""
    if is_deterministic:
        why = "torch's deterministic mode"
    if not why or config.split_matrices is not None or not is_cuda(device):
        return []
    return [f"{named('split_matrices')} is off, not auto, with {why}"]


# --- the exchange ---------------------------------------------------------------------


def held_and_sent(plans: Sequence[ExchangePlan]) -> tuple[int, int]:
    """The most elements of a stage's matrices that a rank holds, and the most bytes
    that it sends in a step; ``plans`` are those of the stage's optimizers.
    """
    held = Counter[int]()
    sent = Counter[int]()
    for plan in plans:
        for one in plan.slices:
            held[one.rank] += one.elements.size
        sent.update(dict(enumerate(plan.sent_bytes())))
    return max(held.values(), default=0), max(sent.values(), default=0)


def memory_line(stages: Iterable[tuple[int, int]]) -> str:
    """What ``held_and_sent`` says of a model's stages: the largest of each."""
    held, sent = map(max, zip(*stages, strict=True))
    return (
        f"memory: a rank holds the momentum of at most {amount(held)} elements, and in "
        f"a step sends at most {amount(sent, 'B')}, in rounds whose buffers "
        f"{named('round_bytes')} caps"
    )


def node_lines(
    plans: Sequence[ExchangePlan], config: MuonConfig, ranks_here: int
) -> list[str]:
    """A warning where ranks that share a matrix may be of several machines.

    Args:
        plans: those of a stage.
        config: ``node_ranks`` is read.
        ranks_here: ranks on this machine, by the launcher.
    """
    shared = itertools.chain.from_iterable(plan.shared for plan in plans)
    homes = max((len(set(one.homes)) for one in shared), default=0)
    if ranks_here >= min(homes, config.node_ranks):
        return []
    return [
        f"warning: a machine has {ranks_here} ranks, and {named('node_ranks')} is "
        f"{config.node_ranks}: ranks that share a matrix may be on several machines; "
        f"set it to {ranks_here}, unless the links between these machines are as fast "
        "as those inside"
    ]


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def amount(number: float, unit: str = "") -> str:
    """Three digits, the letter of a thousand's power, and a unit."""
    for letter in ("", "k", "M", "G"):
        if number < 999.5:  # three digits would make 1e+03 of more
            return f"{number:.3g} {letter}{unit}".strip()
        number /= 1000
    return f"{number:.3g} T{unit}" if number < 999.5 else f"{number:,.0f} T{unit}"
