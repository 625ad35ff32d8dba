"""Weights that hold several projections, row by row, and the splits that they can have.

A split is the choice of a weight's matrices: ``--muon-split PATTERN=KIND``. The class
that holds a weight says how its rows lie, by its own settings. Only where a class is
not Megatron's does the name say it. A weight that is not known yet gets a function in
``_FAMILIES``. ``matrices`` makes the matrices of the split, ``planning.sections`` what
TP ranks hold of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice, repeat
from typing import Any

from megatron.core.transformer.attention import CrossAttention

from megatron_muon.mcore.routing.attention import projections_of
from megatron_muon.mcore.routing.param_routing import (
    Weight,
    is_adapter,
    is_of_class,
    last_of,
    whole_shape,
)
from megatron_muon.planning.sections import Rows, Sections
from megatron_muon.settings.config import MuonConfig, named
from megatron_muon.settings.kinds import OwnSplit, own_split

Splits = dict[str, Sections]  # the rows of a weight in order, by kind of split


@dataclass(frozen=True, slots=True)
class FusedRows:
    """The order of rows in a weight that holds several projections."""

    splits: Splits
    what: str  # the rows in words, for errors
    default: str = "whole"  # the split without a pattern for it
    # TP ranks may hold all of its rows. Without this, a weight that TP does not split
    # at TP > 1 is unknown here.
    may_be_replicated: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The splits that it can have."""
        return ("whole", *self.splits)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each section, which are the same in all splits."""
        sections = next(iter(self.splits.values()))
        return tuple(sum(run.count for run in section) for section in sections)


def fused_of(weight: Weight, rows: int) -> FusedRows | None:
    """How the rows of a weight lie; None where it is one projection, and where it is
    not known.

    ``rows`` are those of the 2-D weight over all TP ranks.
    """
    families = () if is_adapter(weight) else _FAMILIES
    return next((fused for known in families if (fused := known(weight, rows))), None)


def split_of(weight: Weight, config: MuonConfig, fused: FusedRows | None) -> str:
    """The kind of split that a weight of Muon's has: see ``chosen_split``."""
    if fused is None:
        return chosen_split(weight, config, ("whole",), own=True)
    default = fused.default if config.split_qkv else "whole"
    return chosen_split(weight, config, fused.kinds, default, own=True)


def own_sections(own: OwnSplit, rows: int, known: FusedRows | None) -> Sections:
    """The rows of a weight by a split that the user gives by sizes.

    ``known``, the order of the weight's rows, tells which of them each TP rank holds.
    Where that is not known, TP cuts each range of a ``rows:`` split by itself, as in
    Megatron's fused weights, and all rows together of the other splits.
    """
    if own.of == "heads":
        size = rows // own.count
        runs = [Rows(f"head {at}", size) for at in range(own.count)]
    else:
        runs = [Rows(f"part {at}", size) for at, size in enumerate(own.sizes)]
        runs *= own.count
    sizes = own.sizes if own.of == "rows" else (rows,)
    if known is not None and sum(known.sizes) == rows:
        sizes = known.sizes
    return tuple(_cut(runs, sizes))


def _cut(runs: Sequence[Rows], sizes: Sequence[int]) -> Iterator[tuple[Rows, ...]]:
    """``runs`` as sections of these sizes."""
    part_of_row = chain.from_iterable(repeat(run.part, run.count) for run in runs)
    for size in sizes:
        parts = groupby(islice(part_of_row, size))
        yield tuple(Rows(part, len(list(alike))) for part, alike in parts)


def require_own(weight: Weight, kind: str, own: OwnSplit) -> None:
    """Refuse, by a ValueError, a split by sizes that does not fit the weight."""
    rows, cols = whole_shape(weight)
    size, what = (cols, "columns") if own.of == "cols" else (rows, "rows")
    if size % own.total if own.of == "heads" else size != own.total:
        raise ValueError(
            f"{named('splits')} ...={kind}: {weight.name} has {size} {what} over all "
            f"TP ranks, not {'a multiple of ' if own.of == 'heads' else ''}{own.total}"
        )
    if own.of == "cols" and len(set(own.sizes)) > 1:
        raise ValueError(
            f"{named('splits')} ...={kind} matches {weight.name}: ranges of columns "
            "must be equal"
        )


def chosen_split(
    weight: Weight,
    config: MuonConfig,
    kinds: tuple[str, ...],
    default: str = "whole",
    *,
    own: bool = False,
) -> str:
    """The split of the last pattern that matches: of ``kinds``, one's ``own``, or a
    ValueError.
    """
    pattern, kind = last_of(weight, config.splits, default)
    if kind not in kinds and not (own and own_split(kind)):
        raise ValueError(
            f"{named('splits')} {pattern}={kind} matches {weight.name}, which can only "
            f"be {' or '.join(kinds)}: give another kind, or a pattern that does not "
            "match it"
        )
    return str(kind)


def _attention(weight: Weight, rows: int) -> FusedRows | None:
    known = projections_of(weight, rows)
    if known is None:
        return None
    _, head = known.parts[-1]
    parts = [(part, count // head, head) for part, count in known.parts]
    names = ", ".join(part for part, _ in known.parts)
    _, heads, _ = parts[0]
    what = f"the {names} of {known.groups} query groups of {heads} heads of {head}"
    return FusedRows(_by_heads(known.groups, parts), what, "qkv")


def _by_heads(groups: int, parts: Sequence[tuple[str, int, int]]) -> Splits:
    """Groups that have, of each ``(part, heads in a group, rows of a head)``, the heads
    one after another.
    """
    by_part = []
    by_head = []
    for group in range(groups):
        for part, heads, rows in parts:
            by_part.append(Rows(part, heads * rows))
            for head in range(group * heads, (group + 1) * heads):
                by_head.append(Rows(f"{part} {head}", rows))
    return {"qkv": (tuple(by_part),), "heads": (tuple(by_head),)}


def _queries(weight: Weight, rows: int) -> FusedRows | None:
    """The queries of a cross attention, which are not fused with keys and values."""
    holder = weight.holder
    linear = getattr(holder, "linear_q", None)
    if not isinstance(holder, CrossAttention) or weight.module is not linear:
        return None
    heads = int(holder.config.num_attention_heads)
    if rows % heads:
        return None
    return FusedRows(_queries_by_heads(heads, rows // heads), f"the q of {heads} heads")


def _latent(weight: Weight, rows: int) -> FusedRows | None:
    """Multi-latent attention's: up-projections per head, down-projections in blocks."""
    if not is_of_class(weight.holder, "MultiLatentAttention"):
        return None
    model = weight.holder.config
    heads = model.num_attention_heads
    head = model.qk_head_dim
    rope = model.qk_pos_emb_head_dim
    queries = _queries_by_heads(heads, head + rope)
    keys_and_values = (("k", 1, head), ("v", 1, model.v_head_dim))
    latent = (Rows("latent", model.kv_lora_rank), Rows("rope", rope))
    q_latent = Rows("q_latent", model.q_lora_rank or 0)
    splits: dict[str, Splits] = {
        "linear_q_proj": queries,
        "linear_q_up_proj": queries,
        "linear_kv_up_proj": _by_heads(heads, keys_and_values),
        "linear_kv_down_proj": {"parts": (latent,)},
        "linear_qkv_down_proj": {"parts": ((q_latent,), latent)},
    }
    if weight.leaf not in splits:
        return None
    what = f"{weight.leaf} of {heads} heads of multi-latent attention"
    return FusedRows(splits[weight.leaf], what, may_be_replicated=True)


def _queries_by_heads(heads: int, rows: int) -> Splits:
    return {"heads": (tuple(Rows(f"q {head}", rows) for head in range(heads)),)}


def _gated(weight: Weight, rows: int) -> FusedRows | None:
    """A gated fc1: the gate, then the up half; in some experts in alternating
    blocks.
    """
    model = weight.model_config
    if weight.leaf != "linear_fc1" or not model.gated_linear_unit:
        return None
    block = _interleaved_by(weight)
    if block:
        pair = (Rows("gate", block), Rows("up", block))
        pairs = pair * (rows // (2 * block))
        return FusedRows({"gate-up": (pairs,)}, f"blocks of {block} rows")
    half = rows // 2
    halves = ((Rows("gate", half),), (Rows("up", rows - half),))
    return FusedRows({"gate-up": halves}, "a gate and an up half")


def _interleaved_by(weight: Weight) -> int | None:
    """Rows of a block, where gate and up alternate in blocks; since core 0.19, for some
    kernels.
    """
    setting = "moe_mlp_glu_interleave_size"
    if ".shared_experts." in weight.name:
        setting = "moe_shared_expert_glu_interleave_size"
    elif not weight.is_expert:
        return None
    return getattr(weight.model_config, setting, None)


def _state_space(weight: Weight, rows: int) -> FusedRows | None:
    """The in_proj of a Mamba mixer or a gated delta net, whose parts TP splits one by
    one.
    """
    if weight.leaf != "in_proj":
        return None
    holder = weight.holder
    sizes: dict[str, int] = {}
    if is_of_class(holder, "MambaMixer"):
        states = holder.ngroups * holder.d_state
        sizes = {"z": holder.d_inner, "x": holder.d_inner, "B": states, "C": states}
        sizes["dt"] = holder.nheads
    elif is_of_class(holder, "GatedDeltaNet", "GatedDeltaNet2"):
        sizes = _of_delta_net(holder)
    if sum(sizes.values()) != rows:
        return None
    what = f"{', '.join(sizes)} of {type(holder).__name__}"
    sections = tuple((Rows(part, count),) for part, count in sizes.items())
    return FusedRows({"parts": sections}, what)


def _of_delta_net(net: Any) -> dict[str, int]:
    if hasattr(net, "in_proj_split_sections"):  # of a TP rank; since core 0.19
        of_rank = zip(net.in_proj_split_names, net.in_proj_split_sections, strict=True)
        return {name: count * net.tp_size for name, count in of_rank}
    sizes = {"query": net.qk_dim, "key": net.qk_dim, "value": net.v_dim, "z": net.v_dim}
    return {**sizes, "beta": net.num_value_heads, "alpha": net.num_value_heads}


# The first that knows a weight says how its rows lie: see ``fused_of``.
_FAMILIES: tuple[Callable[[Weight, int], FusedRows | None], ...] = (
    _attention,
    _queries,
    _latent,
    _gated,
    _state_space,
)
