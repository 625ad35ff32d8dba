"""Two numbers of each matrix, which tell whether it and its direction are finite.

No pass over a matrix is made for them. The first is the norm that every matrix is
divided by. The second is the largest entry of one line of the direction along its short
side. A direction is QX of an iterate X and a polynomial Q of its short side's square.
If an entry of X is not finite, a row of the square is not, and then nor is one of Q. If
an entry of Q is not finite, each such line of QX has one that is not, since 0 × NaN and
0 × Inf are NaN. One line misses only an overflow elsewhere in the last product of a
finite Q and X. Singular values were then above about 8 in fp16, or 5e7 in
bf16 and fp32, one step before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Soundness:
    """The numbers of matrices, in the order in which these are orthogonalized."""

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
