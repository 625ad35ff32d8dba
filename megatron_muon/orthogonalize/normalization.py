"""X = U/‖U‖: how a matrix enters Newton-Schulz, of any scale.

Squares of entries of any scale leave fp32's range. So a power of two below the largest
entry is divided out before they are added, which rounds nothing. Finding that entry and
dividing by it take a pass each: 12 bytes per element of 16 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_muon.orthogonalize.matmul import Products

_EXPONENT = 0x7F800000  # exponent bits of an fp32 number
_SMALLEST = 2.0**-126  # smallest normal fp32 number


def enter(
    x: Tensor,
    into: Tensor,
    source: Tensor,
    moves: Tensor | None,
    products: Products,
) -> Tensor:
    """Fill ``x`` with the matrices of ``source``, each divided by its norm, as products
    hold them.

    Where ``moves``, ``(k,)`` bool, is False the norm is taken as infinite, so the
    matrix becomes zero. Norms are ``(k,)``, NaN for each matrix with an entry that is
    not finite.

    Args:
        x: ``(k, m, n)`` in ``products.held``.
        into: ``x`` in the shape of ``source``; ``source`` itself, where both share
            memory.
        source: ``(k, rows, ...)``, at most three dims of columns; may be overwritten.
    """
    if is_cpu(source.device):
        whole = torch.empty_like(x, dtype=torch.float32)
        torch.as_strided(whole, into.shape, into.stride()).copy_(source)
        norms = normalize_(whole, moves)
        products.rounded(
            x.copy_(whole if products.scale == 1.0 else whole.mul_(products.scale))
        )
        return norms
    norm = _enter_on_gpu(into, source, moves, products.scale)
    products.rounded(x)
    return norm


def _enter_on_gpu(
    into: Tensor, source: Tensor, moves: Tensor | None, scale: float
) -> Tensor:
    """``enter`` with a norm of ``scale``; ``source`` is overwritten."""
    dims = tuple(range(1, source.dim()))
    largest = torch.linalg.vector_norm(source, math.inf, dim=dims, keepdim=True).float()
    source.div_(power_of_two(largest))
    dtype = torch.promote_types(source.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(source, dim=dims, keepdim=True, dtype=dtype)
    if scale != 1.0:
        norm.div_(scale)
    has_direction = norm > 0
    if moves is not None:
        has_direction &= moves.view(norm.shape)
    torch.div(source, torch.where(has_direction, norm, math.inf), out=into)
    return norm.view(-1)


def power_of_two(largest: Tensor) -> Tensor:
    """The power of two below each entry of an fp32 tensor, the smallest normal one at
    least.
    """
    return (
        (largest.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_min(_SMALLEST)
    )


def normalize_(x: Tensor, moves: Tensor | None = None) -> Tensor:
    """Divide fp32 matrices by their Frobenius norms, in place; zero stays zero.

    The largest entry is divided out first. Then squares of entries neither over- nor
    underflow, and the norm is at least 1, so no epsilon is needed, below which small
    gradients would vanish. Returns ``(k,)``, the norms in units of the largest entry;
    NaN if one is not finite.
    """
    flat = x.view(x.size(0), -1)
    largest = torch.maximum(-flat.amin(1), flat.amax(1))
    flat.div_(torch.where(largest == 0, 1.0, largest)[:, None])
    norms = torch.stack(torch._foreach_norm(list(flat))).clamp_min_(1.0)
    flat.div_(
        (norms if moves is None else torch.where(moves, norms, torch.inf))[:, None]
    )
    return norms


@dataclass(frozen=True, slots=True)
class Soundness:
    """Two numbers of each matrix, which tell whether it and its direction are finite.

    No pass over a matrix is made for them. The first is the norm that every matrix is
    divided by. The second is the largest entry of one line of the direction along its
    short side. A direction is QX of an iterate X and a polynomial Q of its short side's
    square. If an entry of X is not finite, a row of the square is not, and then nor is
    one of Q. If an entry of Q is not finite, each such line of QX has one that is not,
    since 0 × NaN and 0 × Inf are NaN. One line misses only an overflow elsewhere in the
    last product of a finite Q and X. Singular values were then above about 8 in fp16,
    or 5e7 in bf16 and fp32, one step before.

    They are in the order in which the matrices are orthogonalized.
    """

    # each (k,); NaN: an input is not finite
    norms: list[Tensor] = field(default_factory=list)
    # each (k,); NaN, Inf: a direction is not
    lines: list[Tensor] = field(default_factory=list)

    def of_units(self, units: Soundness) -> None:
        """Add matrices of which each has several units: a unit that is not finite
        counts.
        """
        self.norms.append(torch.stack(units.norms).amax(dim=0))
        self.lines.append(torch.stack(units.lines).amax(dim=0))


def largest_of(line: Tensor) -> Tensor:
    """The largest absolute value in the last dim; NaN if one of them is NaN."""
    largest: Tensor = torch.linalg.vector_norm(line, math.inf, dim=-1)
    return largest


def is_cpu(device: torch.device) -> bool:
    """Whether matrices go the way of a CPU."""
    return device.type == "cpu"
