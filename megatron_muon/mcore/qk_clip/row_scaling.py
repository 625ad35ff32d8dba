"""Multiplication of the rows of a matrix of which a tensor holds any range of
elements.
"""

from __future__ import annotations

from torch import Tensor


def scale_rows(flat: Tensor, start: int, cols: int, factors: Tensor) -> None:
    """Multiply elements of a row-major (rows, cols) matrix by their rows' factors, in
    place.

    Each product is computed in fp32 and rounded once to the dtype of ``flat``.

    ``flat`` is contiguous, in any float dtype: elements [start, start + n). Factors are
    in fp32.
    """
    count = flat.numel()
    head = min(-start % cols, count)  # up to the end of a row that has begun before
    rows = (count - head) // cols
    body = head + rows * cols
    first = -(-start // cols)  # the first row that begins here
    # any of the three may be empty; a factor of one element keeps its dimension: a
    # scalar would be cast to the dtype of ``flat``
    flat[:head].mul_(factors[start // cols : start // cols + 1])
    flat[head:body].view(rows, cols).mul_(factors[first : first + rows, None])
    flat[body:].mul_(factors[first + rows : first + rows + 1])
