"""A plan in words: the lines that a run prints at its start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_muon.orthogonalize.numerics import Device, Numerics, is_cuda
from megatron_muon.planning.homes import LINK_GBYTES
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.schedule import ADAMW
from megatron_muon.settings.coefficients import spelled, steps_made_for
from megatron_muon.settings.config import MuonConfig, named
from megatron_muon.settings.run import NODE

PREFIX = "[megatron_muon]"


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
    # elements of AdamW's 2-D weights, by what they are
    kept: Mapping[str, int] = field(default_factory=dict)
    unsplit: Sequence[str] = ()  # the keys of UNSPLIT that it has
    # names of fused projections that are not split, since their order of rows is not
    # known
    unknown_fusions: Sequence[str] = ()

    def __add__(self, other: Share) -> Share:
        return Share(
            self.total + other.total,
            self.muon + other.muon,
            self.active + other.active,
            self.active_muon + other.active_muon,
            dict(Counter(self.kept) + Counter(other.kept)),
            [leaf for leaf in UNSPLIT if leaf in self.unsplit or leaf in other.unsplit],
            list(dict.fromkeys([*self.unknown_fusions, *other.unknown_fusions])),
        )


def active_line(version: str, core: str) -> str:
    """This package's Muon runs, and not Megatron's own; both packages' versions."""
    return (
        f"{PREFIX} megatron-muon {version} is active: Distributed Muon over the "
        f"DistributedOptimizer of megatron-core {core}"
    )


# Fused projections that are one matrix each, by the name of their module.
UNSPLIT = {
    "linear_kv_down_proj": "multi-latent attention's projections",
    # with queries, from 0.19 on
    "linear_qkv_down_proj": "multi-latent attention's projections",
    "in_proj": "the in_proj of state-space layers",
}


def share_lines(share: Share) -> list[str]:
    """Lines about a model: Muon's share, less than half of it, and fusions that are not
    split.

    Raises:
        ValueError: the share is zero.
    """
    require_muons(share)
    all_of_it = _ratio(share.muon, share.total)
    activated = _ratio(share.active_muon, share.active)
    of_active = (
        f" and {activated:.1%} of the {_count(share.active)} that a token activates"
    )
    lines = [
        f"{PREFIX} Muon has {all_of_it:.1%} of the model's {_count(share.total)} "
        "parameters"
        f"{of_active if share.active < share.total else ''}, AdamW the rest"
        + "".join(
            f"; {UNSPLIT[leaf]} are one matrix each, not split"
            for leaf in share.unsplit
        )
    ]
    if min(all_of_it, activated) < 0.5:
        lines.append(
            f"{PREFIX} warning: Muon updates less than half of the parameters; "
            f"{_kept(share)}: expect little difference from AdamW"
        )
    if share.unknown_fusions:
        lines.append(
            f"{PREFIX} {named('split_qkv')} has no effect on "
            f"{', '.join(share.unknown_fusions)}: the order of rows is known only of "
            "Megatron's SelfAttention and CrossAttention, so each is one matrix"
        )
    return lines


def require_muons(share: Share) -> None:
    """Refuse a model of which Muon has nothing.

    Raises:
        ValueError: see above; names what AdamW has.
    """
    if share.total and not share.muon:
        raise ValueError(
            f"Muon has none of the model's {_count(share.total)} parameters; "
            f"{_kept(share)}: change {named('muon_include')} or "
            f"{named('muon_exclude')} of MuonConfig so that Muon has some of these, or "
            "choose optimizer='adam'"
        )


def _kept(share: Share) -> str:
    """What AdamW's 2-D weights are, by their part of the model, the largest first."""
    largest = Counter(share.kept).most_common()
    parts = [f"{what}, {_ratio(size, share.total):.1%}" for what, size in largest[:5]]
    more = f"; and {len(largest) - 5} more kinds" if len(largest) > 5 else ""
    return (
        f"AdamW has the 2-D weights of {'; '.join(parts)}{more}"
        if parts
        else "none is 2-D"
    )


def not_shared_lines(
    config: MuonConfig, device: Device, *, is_deterministic: bool
) -> list[str]:
    """A line where a GPU does not take its default for ``split_matrices``, with the
    reason.
    """
    if config.split_matrices is not None or not is_cuda(device):
        return []
    if not is_deterministic and config.log_interval is None:
        return []
    why = "torch's deterministic mode" if is_deterministic else named("log_interval")
    return [f"{PREFIX} {named('split_matrices')} is off, not auto, with {why}"]


def newton_schulz_line(numerics: Numerics, products: str, *, in_batches: bool) -> str:
    """The iteration.

    Args:
        numerics: of the run.
        products: the library that makes the symmetric products.
        in_batches: whether matrices of one shape are orthogonalized together
            (``ns_batch``).
    """
    batches, config = "", numerics.config
    if in_batches and config.ns_batch != 1:
        most = "all" if config.ns_batch is None else f"up to {config.ns_batch}"
        batches = f"; {most} matrices of one shape at once"
    elif (config.ns_batch or 1) > 1:
        batches = (
            f"; one matrix at a time, not {config.ns_batch}: a CPU and torch's "
            "deterministic mode take no batches"
        )
    dtype = f"{numerics.dtype}{_of_preset(numerics) if config.ns_dtype is None else ''}"
    steps = f"{config.ns_steps} steps{steps_unlike_own(config)}"
    return (
        f"{PREFIX} Newton-Schulz: {spelled(config.ns_coefficients)}, {steps}, "
        f"{dtype}, {_iteration(numerics)}; symmetric products: {products}"
        f"{batches}"
    )


def steps_unlike_own(config: MuonConfig) -> str:
    """Words for a number of steps that the coefficients are not made for; else
    empty.
    """
    made_for = steps_made_for(config.ns_coefficients)
    return "" if made_for in (None, config.ns_steps) else f" (made for {made_for})"


def _of_preset(numerics: Numerics) -> str:
    return f" (--muon-preset {numerics.config.preset})" if numerics.on_gpu else ""


def _iteration(numerics: Numerics) -> str:
    """The iteration's name, and why it is not the one that was asked for, or the
    preset's.
    """
    name, wanted, preset = (
        numerics.iteration,
        numerics.config.ns_iteration,
        _of_preset(numerics),
    )
    is_safe = numerics.config.preset == "safe" or not preset
    if wanted == name or (wanted is None and not preset):
        return name
    if name == "auto" or (wanted is None and is_safe):
        return f"{name}{preset}"
    asked = "auto" if wanted else f"auto{preset}"
    return (
        f"standard (in place of {asked} since the Gram iteration has not been found "
        "accurate with these coefficients, steps and dtype)"
    )


def start_line(
    plan: ExchangePlan,
    *,
    stage: int,
    experts: bool,
    buckets: Sequence[int],
    earlier: Sequence[ExchangePlan] = (),
) -> str:
    """One line about the Muon part of one DistributedOptimizer of a pipeline stage.

    Args:
        plan: the plan of that optimizer.
        stage: pipeline rank.
        experts: whether it is the experts' optimizer.
        buckets: number of buckets in each grad buffer of a rank.
        earlier: plans of the stage's optimizers before it. Homes balance the work of
            all of them together, so the busiest rank is that of the sum.
    """
    flops = plan.ns_flops()
    sent = plan.sent_bytes()
    least = _amount(sum(sent) / len(sent))
    most = _amount(max(sent))
    together = [
        sum(each)
        for each in zip(flops, *(one.ns_flops() for one in earlier), strict=True)
    ]
    mean = sum(together) / len(together)
    return (
        f"{PREFIX} pipeline stage {stage}{', experts' if experts else ''}: "
        f"{len(plan.matrices)} matrices in {len(plan.parameters)} parameters, of which "
        f"shards cut {len(plan.boundary_parameters())}; {sum(buckets)} bucket(s); a "
        f"rank sends {least}B a step{f' (busiest {most}B)' if least != most else ''} "
        f"in {len(plan.rounds)} round(s); Newton-Schulz {_amount(sum(flops))}flop a "
        f"step on the stage, {max(together) / mean if mean else 1:.2f} × the mean on "
        f"the busiest rank{', with the matrices above' if earlier else ''}"
    )


def block_line(
    plan: ExchangePlan, config: MuonConfig, *, stage: int, experts: bool
) -> str:
    """One line about the steps between full ones, of which this is the plan; see
    ``start_line``.
    """
    sent = plan.sent_bytes()
    flops = plan.ns_flops()
    rate = (
        f", at {config.block_lr_mult:g} × the rate" if config.block_lr_mult != 1 else ""
    )
    return (
        f"{PREFIX} pipeline stage {stage}{', experts' if experts else ''}: every "
        f"{config.full_period} steps one is full; the others orthogonalize each TP "
        f"slice by itself{rate}: {len(plan.matrices)} matrices, "
        f"{_amount(sum(sent) / len(sent))}B a rank, {_amount(sum(flops))}flop on the "
        "stage"
    )


def homes_lines(config: MuonConfig) -> list[str]:
    """A line on the two speeds that homes are chosen by, where ``homes`` leaves it to
    the plan.
    """
    if config.homes != "auto":
        return []
    link = named("link_gbytes")
    tflops = f"{named('rank_tflops')} {config.rank_tflops:g}"
    if config.link_gbytes is not None:
        return [
            f"{PREFIX} homes by time, from {tflops} and {link} {config.link_gbytes:g}"
        ]
    return [
        f"{PREFIX} homes by work: no {link} is given, so {LINK_GBYTES:g} is assumed. "
        "State it where the link is slower: megatron-muon bench speeds prints the flag"
    ]


def node_lines(
    plans: Sequence[ExchangePlan], config: MuonConfig, ranks_here: int
) -> list[str]:
    """A warning where ranks that share a matrix may be of several nodes.

    Args:
        plans: those of a stage.
        config: ``node_ranks`` is read.
        ranks_here: ranks on this machine, by the launcher.
    """
    shared = [one for plan in plans for one in plan.shared]
    homes = max((len(set(one.homes)) for one in shared), default=0)
    by_rows = max(
        (len(set(one.homes)) for one in shared if any(one.gathers)), default=0
    )
    setting = f"{named('node_ranks')} is {config.node_ranks}"
    if ranks_here < min(homes, config.node_ranks):
        return [
            f"{PREFIX} warning: a machine has {ranks_here} ranks, and {setting}: ranks "
            f"that share a matrix may be on several machines; set it to {ranks_here}, "
            "unless the links between these machines are as fast as those inside"
        ]
    neighbours = min((plan.grid.neighbours for plan in plans), default=NODE)
    if neighbours < by_rows:
        return [
            f"{PREFIX} warning: only {neighbours} of a stage's ranks in a row are of "
            f"one node, and {setting}: set it to {neighbours}, so that large squares "
            "do not travel between nodes"
        ]
    return []


def late_gather_lines(why: str | None) -> list[str]:
    """A line where ``early_param_gather`` is not on by default, with what forbids
    it.
    """
    return (
        []
        if why is None
        else [f"{PREFIX} {named('early_param_gather')} is off with {why}"]
    )


def early_gathers_line(
    gathers: Sequence[int | None],
    rounds: int,
    *,
    stage: int,
    experts: bool,
    in_any_loop: bool,
) -> str:
    """One line about the parameters that are gathered within the step
    (``early_param_gather``).

    Args:
        gathers: the round after which each bucket's starts, see ``schedule.starts``.
        rounds: the number of rounds in a step.
        stage: pipeline rank.
        experts: whether the parameters are the experts' optimizer's.
        in_any_loop: False: in Megatron-LM's own training loop only.
    """
    first = gathers[0]
    begin = "the optimizer's step"
    if first is not None and first < rounds - 1:
        begin = "AdamW's part" if first == ADAMW else f"round {first + 1} of {rounds}"
    started = [after for after in gathers if after is not None]
    within = sum(after < rounds - 1 for after in started)
    other_loops = (
        "" if in_any_loop else "; outside Megatron-LM's training loop all start there"
    )
    return (
        f"{PREFIX} pipeline stage {stage}{', experts' if experts else ''}: the first "
        f"gather of parameters starts after {begin}; of {len(gathers)} {within} start "
        f"within the step, {len(started) - within} at its end, "
        f"{len(gathers) - len(started)} in the forward pass{other_loops}"
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _count(number: int) -> str:
    return _amount(number).strip()


def _amount(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 999.5:  # three digits would make 1e+03 of more
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} T" if number < 999.5 else f"{number:,.0f} T"
