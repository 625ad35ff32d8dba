"""Newton-Schulz orthogonalization of matrices: tensors in, tensors out, no groups.

Two iterations that differ in rounding only (``iteration`` says which a matrix gets):
the standard one of arXiv 2502.16982 eq. 2 and
https://kellerjordan.github.io/posts/muon, and the Gram one, both started from X =
U/‖U‖, where U is the momentum (G + μM with Nesterov's). In fp16 an iterate is held as
128·X, so that small entries stay (``matmul.scale_of``). ``coefficients.GRAM_ERROR``
bounds the Gram one's error by the standard one's. The order of operations is part of
the definition, since another order gives other bits; ``matmul`` says what a product
rounds to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_muon.orthogonalize.gram import gram_iteration
from megatron_muon.orthogonalize.iteration import scratch_elements, takes_gram
from megatron_muon.orthogonalize.matmul import (
    TORCH_DTYPE,
    Products,
    numerics_on,
    products_on,
    sums_in_fp32,
)
from megatron_muon.orthogonalize.normalization import (
    Soundness,
    enter,
    is_cpu,
    largest_of,
)
from megatron_muon.orthogonalize.numerics import Numerics, Steps
from megatron_muon.settings.config import MuonConfig

# (matrices, steps or segments, products, spare memory)
Iteration = Callable[[Tensor, Any, Products, Tensor | None], Tensor]
_LINE = 32  # elements of 2 bytes in the alignment of torch's own memory, 64 bytes
# Of matrices that a CPU takes together: their fp32 copies, 1 MiB, stay in its caches.
_CPU_ELEMENTS = 1 << 18


def orthogonalize(matrix: Tensor, config: MuonConfig) -> Tensor:
    """The direction of a matrix: all its singular values brought near 1.

    The matrix is ``(rows, cols)`` in any floating dtype, else a ValueError is raised;
    the result has ``Numerics.dtype``. Any scale: it is normalised in fp32, by its
    largest entry first, so nothing over- or underflows. Zero gives zero.
    """
    return orthogonalize_at_once([matrix], config)[0]


def orthogonalize_at_once(
    matrices: Sequence[Tensor], config: MuonConfig
) -> list[Tensor]:
    """The directions of matrices of one shape, made together.

    A GPU's products are batched, and may round otherwise than those of a single matrix.
    A CPU's are not, and the result is that of ``orthogonalize``.

    Raises:
        ValueError: there are none, or they are not 2-D or not of one shape.
    """
    shapes = {tuple(matrix.shape) for matrix in matrices}
    if len(shapes) != 1 or any(len(shape) != 2 for shape in shapes):
        raise ValueError(
            f"matrices have 2 dims, and in a batch one shape, got {sorted(shapes)}"
        )
    batch = torch.stack(list(matrices))
    numerics = numerics_on(batch.device, config)
    directions = batch.new_empty(batch.shape, dtype=TORCH_DTYPE[numerics.dtype])
    _orthogonalize_into(directions, batch, numerics, None)
    return list(directions)


def orthogonalize_staged(
    staged: Tensor,
    moves: Tensor,
    numerics: Numerics,
    *,
    rows: int,
    cols: int,
    column_parts: int = 1,
    column_blocks: int = 1,
    apart: bool = False,
    soundness: Soundness | None = None,
) -> Tensor:
    """Replace matrices of one shape in staging order by their directions, in place.

    The iterates alternate between two places. The matrices' own memory is one of them,
    so only one more is needed, and memory for the short side's squares.

    Args:
        staged: ``(k·rows·cols,)`` in ``Numerics.travels``: k matrices, each with its
            column parts one after another (``planning.slices``).
        moves: ``(k,)`` bool; where it is False the direction is zero.
        rows, cols, column_parts, column_blocks: layout of each matrix
            (``layout.Matrix``).
        apart: each column block is orthogonalized as a matrix of its own.

    Returns:
        ``staged``'s memory in ``Numerics.dtype``, whose elements are of the same size.
    """
    layout = rows, cols, column_parts, column_blocks
    in_rows = by_rows(staged, *layout)
    directions = staged.view(TORCH_DTYPE[numerics.dtype])
    out = by_rows(directions, *layout)
    soundness = soundness or Soundness()
    if apart:
        units = Soundness()
        for at in range(column_blocks):
            _orthogonalize_into(
                out[:, :, at], in_rows[:, :, at], numerics, moves, soundness=units
            )
        soundness.of_units(units)
        return directions
    is_direct = column_parts == 1
    _orthogonalize_into(
        out,
        in_rows,
        numerics,
        moves,
        memory=staged,
        is_direct=is_direct,
        soundness=soundness,
    )
    return directions


def by_rows(
    staged: Tensor, rows: int, cols: int, column_parts: int, column_blocks: int
) -> Tensor:
    """Matrices in staging order as ``(k, rows, column blocks, column parts, width)``, a
    view; arguments are as of ``orthogonalize_staged``.
    """
    width = cols // (column_parts * column_blocks)
    cut = staged.view(-1, column_parts, rows, column_blocks, width)
    return cut.permute(0, 2, 3, 1, 4)


def takes_batches(device: torch.device) -> bool:
    """Whether products are of several matrices of one shape.

    A CPU's are of one. So are those of torch's deterministic mode, since the layout
    decides which matrices share a batch.
    """
    return not (is_cpu(device) or torch.are_deterministic_algorithms_enabled())


def at_once_on(
    device: torch.device, numerics: Numerics, rows: int, cols: int, most: int
) -> int:
    """The most matrices of a shape that go through the iteration together.

    On a CPU they share what is not a product, with the same bits. Where ``ns_batch`` is
    None they have at most ``most`` elements of scratch memory.
    """
    if is_cpu(device):
        # else a later one is multiplied otherwise
        is_aligned = rows * cols % _LINE == 0
        return max(1, _CPU_ELEMENTS // (rows * cols)) if is_aligned else 1
    if not takes_batches(device):
        return 1
    if numerics.config.ns_batch is not None:
        return numerics.config.ns_batch
    return max(1, most // scratch_elements(rows, cols))


def _orthogonalize_into(
    out: Tensor,
    source: Tensor,
    numerics: Numerics,
    moves: Tensor | None,
    *,
    memory: Tensor | None = None,
    is_direct: bool = False,
    soundness: Soundness | None = None,
) -> None:
    """Write the directions of k matrices.

    Args:
        out: ``(k, rows, ...)``, like ``source``, with which it may share memory.
        source: ``(k, rows, ...)``; the dims after the second one are the columns.
        moves: ``(k,)`` bool; where it is False the direction is zero. None: all move.
        memory: flat, of k matrices, may be overwritten once ``source`` is read.
        is_direct: ``memory`` is that of ``source``, which is row-major.
        soundness: takes two numbers of each matrix.
    """
    products = products_on(source.device, numerics)
    rows = source.size(1)
    cols = source[0, 0].numel()
    # A GPU multiplies tall matrices as they are; on a CPU the short side is first.
    is_mirrored = is_cpu(source.device) and rows > cols
    shape = (
        (source.size(0), cols, rows) if is_mirrored else (source.size(0), rows, cols)
    )
    is_direct = (
        is_direct and not is_mirrored and products.held.itemsize == source.itemsize
    )

    def like_source(x: Tensor) -> Tensor:
        return torch.unflatten(x.mT if is_mirrored else x, 2, source.shape[2:])

    iteration: Iteration = standard_iteration
    parts: Sequence[Any] = numerics.steps
    if takes_gram(rows, cols, numerics):
        iteration, parts = gram_iteration, numerics.segments
    first = torch.empty(shape, dtype=products.held, device=source.device)
    second: Tensor | None = None
    if memory is not None and memory.element_size() == first.element_size():
        second = memory.view(products.held).view(shape)
    # so that the last iterate is there, too
    starts_in_memory = is_direct and len(parts) % 2 == 0
    if starts_in_memory and second is not None:
        first, second = second, first
    into = source.view(products.held) if starts_in_memory else like_source(first)
    # A whole matrix has the same bits in every layout then; on a CPU it always has.
    one_by_one = numerics.config.ns_batch == 1 or not takes_batches(source.device)
    in_parts = source.dim() == 5 and source.size(3) > 1
    if one_by_one and in_parts and not is_cpu(source.device):
        # A norm's sums go by the order in memory, and TP's parts lie one after another.
        in_rows = first.view(source.dtype)
        like_source(in_rows).copy_(source)
        norms = enter(first, first, in_rows, moves, products)
    else:
        norms = enter(first, into, source, moves, products)
    x = _iterated(iteration, first, parts, products, second)
    if soundness is not None:
        soundness.norms.append(norms)
        is_tall = x.size(1) > x.size(2)
        soundness.lines.append(largest_of(x[:, 0] if is_tall else x[:, :, 0]))
    if is_direct:  # x is in the memory of source, which is that of out
        return
    if second is not None and len(parts) % 2 == 1:
        x = first.copy_(x)
    out.copy_(like_source(x))


def _iterated(
    iteration: Iteration,
    x: Tensor,
    parts: Sequence[Any],
    products: Products,
    spare: Tensor | None,
) -> Tensor:
    """The iteration of k matrices, batched or one by one."""
    with sums_in_fp32(x.device):
        if x.size(0) == 1:  # products of a single matrix are not batched
            beside = None if spare is None else spare[0]
            return iteration(x[0], parts, products, beside)[None]
        if takes_batches(x.device):
            return iteration(x, parts, products, spare)
        spare = torch.empty_like(x) if spare is None else spare
        for one, beside in zip(x, spare, strict=True):
            iteration(one, parts, products, beside)
    return spare if len(parts) % 2 else x


def standard_iteration(
    x: Tensor,
    steps: Steps,
    products: Products,
    spare: Tensor | None = None,
) -> Tensor:
    """Each step: A = XXᵀ, B = bA + cA², X ← aX + BX; arguments are as of
    ``gram_iteration``.

    A tall X has A = XᵀX and X ← aX + XB. On a CPU no product is made in panels, since
    other implementations are compared with this one step by step.
    """
    products = products.plain()
    is_tall = x.size(-2) > x.size(-1)
    for step, (a, b, c) in enumerate(steps):
        unscale = products.unscale(is_last=step == len(steps) - 1)
        square, alpha = products.power_sum(products.short_square(x), b, c)
        beta = products.fold(square, a * unscale, alpha * unscale)
        before = x
        x = products.times(
            square, x, beta=beta, alpha=alpha * unscale, is_tall=is_tall, out=spare
        )
        spare = None if spare is None else before
        del square, before
    return x
