"""The factor of each row of a weight, from its heads' largest logits.

Operations and dtypes are those of Megatron's ``clip_qk`` on a whole weight, so that the factors are
the same bits. On a CPU a power depends on an element's place in its tensor. So powers are taken of
tensors of Megatron's shapes, whatever part of them a rank needs.
"""

from __future__ import annotations

import torch

from megatron_muon.mcore.qk_clip.heads import HeadRows, Kind


def eta_of(largest: torch.Tensor, groups: int, threshold: float) -> torch.Tensor:
    """``threshold / logit`` where the largest logit of a group is above the threshold, else 1.

    Megatron's expression gives a head whose logits are all negative a negative eta, and then NaN
    for its weights, and an infinite logit 0. Such heads are left as they are here.

    Args:
        largest: (heads,), in any float dtype: the largest logit of each head.
        groups: consecutive heads form this many equal groups.
        threshold: above 0.

    Returns:
        (groups,), in the dtype of ``largest``.
    """
    of_group = torch.max(largest.view(groups, -1), dim=1).values
    eta = torch.clamp(threshold / of_group, max=1.0)
    is_above = (of_group > threshold) & torch.isfinite(of_group)
    return torch.where(is_above, eta, torch.ones_like(eta))


def row_factors(eta: torch.Tensor, heads: HeadRows, alpha: float) -> torch.Tensor:
    """The factor of each row of the whole weight.

    Args:
        eta: (groups,), from ``eta_of``.
        heads: how the rows lie.
        alpha: in (0, 1): the queries' share of the clip.

    Returns:
        (rows,) in fp32.
    """
    column = eta.view(heads.groups, 1, 1)
    parts = [_factors(column, kind, count, alpha, heads.is_latent) for kind, count in heads.parts]
    return torch.cat(parts, dim=1).view(-1).float()


def _factors(
    eta: torch.Tensor, kind: Kind, rows: int, alpha: float, is_latent: bool
) -> torch.Tensor:
    """(groups, rows, 1): the factors of one part."""
    if kind == "kept":
        return torch.ones_like(eta).expand(-1, rows, 1)
    if kind == "rotary":
        return eta.expand(-1, rows, 1)
    if kind == "key":
        return torch.pow(eta, 1 - alpha).expand(-1, rows, 1)
    if is_latent:
        return torch.pow(eta, alpha).expand(-1, rows, 1)
    return torch.pow(eta.repeat(1, rows, 1), alpha)
