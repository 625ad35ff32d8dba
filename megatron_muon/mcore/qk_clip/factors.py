"""The rows of an attention's weight by head, and the factor of each row from the
largest logits.

Operations and dtypes are those of Megatron's ``clip_qk`` on a whole weight, so that the
factors are the same bits. On a CPU a power depends on an element's place in its tensor.
So powers are taken of tensors of Megatron's shapes, whatever part of them a rank needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_muon.mcore.routing.attention import GroupedRows


def eta_of(largest: Tensor, groups: int, threshold: float) -> Tensor:
    """``threshold / logit`` where the largest logit of a group is above the threshold,
    else 1.

    Megatron's expression gives a head whose logits are all negative a negative eta, and
    then NaN for its weights, and an infinite logit 0. Here such heads stay unchanged.

    ``largest`` is (heads,), in any float dtype, the result (groups,) in the same.
    """
    of_group = torch.max(largest.view(groups, -1), dim=1).values
    eta = torch.clamp(threshold / of_group, max=1.0)
    is_above = (of_group > threshold) & torch.isfinite(of_group)
    return torch.where(is_above, eta, torch.ones_like(eta))


def row_factors(eta: Tensor, whole: GroupedRows, alpha: float) -> Tensor:
    """The factor of each row of the whole weight, (rows,) in fp32, from ``eta_of``,
    (groups,).

    The heads of a group share their keys, and so one factor. A clip by eta multiplies q
    by eta^alpha, k by eta^(1 - alpha), and by eta rotary, a query's rotary part whose
    key all heads share. Other parts stay as they are.
    """
    column = eta.view(whole.groups, 1, 1)
    powers = {"q": alpha, "k": 1 - alpha, "rotary": 1.0}
    parts = []
    for part, rows in whole.parts:
        if part == "q" and not whole.is_latent:
            parts.append(torch.pow(column.repeat(1, rows, 1), alpha))
        else:
            power = powers.get(part, 0.0)
            parts.append(torch.pow(column, power).expand(-1, rows, 1))
    return torch.cat(parts, dim=1).view(-1).float()
