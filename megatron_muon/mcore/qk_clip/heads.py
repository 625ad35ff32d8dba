"""Which rows of an attention's weight belong to which head, as plain integers.

Rows are those of the whole weight, over all TP ranks, of which each rank has an equal range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_muon.planning.layout import Span

# A row's part in a clip by eta: ``query`` is multiplied by eta^alpha, ``key`` by eta^(1 - alpha)
# and ``rotary`` by eta. ``rotary`` is a query's rotary part whose key all heads share. The rest is
# ``kept``.
Kind = Literal["query", "key", "rotary", "kept"]

_KIND_OF_PART: dict[str, Kind] = {"q": "query", "k": "key", "gate": "kept", "v": "kept"}


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of a weight, which repeat group by group.

    Attributes:
        groups: how often. The heads of a group share their keys, and so one factor.
        parts: ``(kind, rows of it in one group)``, in order.
        is_latent: an up-projection of multi-latent attention.
    """

    groups: int
    parts: tuple[tuple[Kind, int], ...]
    is_latent: bool = False

    @property
    def rows(self) -> int:
        """Rows of the whole weight."""
        return self.groups * sum(count for _, count in self.parts)

    def local(self, tp_rank: int, tp_size: int) -> Span:
        """The rows that a TP rank has.

        Raises:
            ValueError: the ranks' ranges are not equal.
        """
        each, rest = divmod(self.rows, tp_size)
        if rest:
            raise ValueError(f"{self.rows} rows are not {tp_size} equal ranges")
        return Span(tp_rank * each, (tp_rank + 1) * each)


def fused(groups: int, group_rows: tuple[tuple[str, int], ...]) -> HeadRows:
    """A fused projection, e.g. (q, k, v) for each query group.

    Args:
        groups: query groups.
        group_rows: ``(part, rows of it in one group)``, as in ``params.attention.Projections``.
    """
    return HeadRows(groups, tuple((_KIND_OF_PART[part], count) for part, count in group_rows))


def latent_queries(heads: int, head: int, rotary: int) -> HeadRows:
    """The query (up-)projection of multi-latent attention.

    Args:
        heads: number of heads.
        head, rotary: rows of a head without and with rotary embedding.
    """
    return HeadRows(heads, (("query", head), ("rotary", rotary)), is_latent=True)


def latent_keys(heads: int, head: int, value: int) -> HeadRows:
    """The up-projection of keys and values of multi-latent attention.

    Args:
        heads: number of heads.
        head, value: rows of a head's key and of its value.
    """
    return HeadRows(heads, (("key", head), ("kept", value)), is_latent=True)
