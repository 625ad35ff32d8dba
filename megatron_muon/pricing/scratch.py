"""Scratch memory of a round: that of Newton-Schulz, and of elementwise work on lists.

Sizes are those of ``orthogonalize.newton_schulz`` and ``runtime.update``. A GPU takes matrices in
batches and holds them in the dtype in which they travel. A CPU takes one at a time and enters it in
fp32; without bf16 instructions it holds every iterate in fp32, too.

Left out are single numbers, and what oneDNN's bf16 product takes on a CPU with such instructions:
97 to 193 KiB a thread for products of 256 to 2048.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatron_muon.config import MuonConfig
from megatron_muon.orthogonalize.iteration import (
    Device,
    dtype_of,
    held_dtype,
    is_cuda,
    itemsize_of,
    schedule_of,
    segments,
    takes_gram,
)
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.rounds.cut import ELEMENTS_AT_ONCE, scratch_limit
from megatron_muon.planning.segments import Matrix
from megatron_muon.pricing.kernels import batches
from megatron_muon.pricing.work import RoundWork

_FP32 = 4
_BYTES = {"bf16": 2, "fp16": 2, "fp32": _FP32}


def of_newton_schulz(
    plan: ExchangePlan, works: Sequence[RoundWork], config: MuonConfig, device: Device
) -> list[list[int]]:
    """Bytes beside the matrices themselves at Newton-Schulz's highest moment: ``[round][rank]``.

    Args:
        plan: of one optimizer.
        works: its rounds.
        config: the settings that made it.
        device: kind of device of all ranks.
    """
    if not is_cuda(device):
        return [
            [_most_on_cpu(matrices, config, device) for matrices in ranks] for ranks in _homed(plan)
        ]
    limit = scratch_limit(plan.matrices)
    return [
        [
            _of_batches(work, rank, config, limit, device) * plan.itemsize
            for rank in range(plan.size)
        ]
        for work in works
    ]


def of_momentum(elements: int, config: MuonConfig, device: Device) -> int:
    """Bytes in which the input of Newton-Schulz is made, before it is rounded to what travels.

    Args:
        elements: that this rank sends or keeps as a home.
        config, device: see ``of_newton_schulz``.
    """
    if not (_works_on_lists(config, device) and config.nesterov):
        return 0
    return _FP32 * min(elements, ELEMENTS_AT_ONCE)


def of_update(elements: int, config: MuonConfig, device: Device) -> int:
    """Bytes of directions in fp32; a list's copies are there until the next list's are made.

    Args:
        elements: that this rank holds.
        config, device: see ``of_newton_schulz``.
    """
    if not _works_on_lists(config, device) or config.ns_dtype == "fp32":
        return 0
    return _FP32 * min(elements, 2 * ELEMENTS_AT_ONCE)


def _works_on_lists(config: MuonConfig, device: Device) -> bool:
    """As ``runtime.fused.elementwise_on``; a GPU's machine is taken to have triton."""
    return not is_cuda(device) or config.elementwise == "foreach"


# --- GPU ---------------------------------------------------------------------------------------


def _of_batches(work: RoundWork, rank: int, config: MuonConfig, limit: int, device: Device) -> int:
    """Elements of scratch memory of the largest batch."""
    most = 0
    for layout, count in work.layouts[rank].items():
        rows, cols, *_ = layout
        if layout.shared is not None:
            most = max(most, _of_strip(rows * cols, min(layout.shared.whole)))
            continue
        of_one = _of_one(rows, cols, config, device)
        for together, _ in batches(rows, cols, count, ns_batch=config.ns_batch, scratch=limit):
            most = max(most, together * of_one)
    return most


def _of_strip(elements: int, short: int) -> int:
    """A strip's iterate and its copy in fp32, or its next iterate and seven squares."""
    return elements + max(2 * elements, elements + 7 * short * short)


def _of_one(rows: int, cols: int, config: MuonConfig, device: Device) -> int:
    """The next iterate and squares: two, or those of Gram's four that do not fit into a spare one.

    ``scratch_elements`` is the most that either iteration takes.
    """
    square = min(rows, cols) ** 2
    squares = 2
    if takes_gram(rows, cols, config, device):
        squares = _squares_outside(rows * cols, square)
    return rows * cols + squares * square


def _squares_outside(elements: int, square: int) -> int:
    """Gram's four squares, but for those that fit into an iterate's memory."""
    return 4 - min(3, elements // square)


# --- CPU ---------------------------------------------------------------------------------------


def _homed(plan: ExchangePlan) -> Iterator[list[list[Matrix]]]:
    """For each round, by rank, the matrices that it orthogonalizes."""
    of_parameter = []
    matrices = iter(plan.matrices)
    for parameter in plan.parameters:
        of_parameter.append([next(matrices) for _ in parameter.matrices])
    for members in plan.rounds:
        by_rank: list[list[Matrix]] = [[] for _ in range(plan.size)]
        for matrix in (matrix for index in members for matrix in of_parameter[index]):
            by_rank[matrix.home].append(matrix)
        yield by_rank


def _most_on_cpu(matrices: Iterable[Matrix], config: MuonConfig, device: Device) -> int:
    """Bytes; the strips of a matrix that are here are taken together."""
    most, strips = 0, 0
    for matrix in matrices:
        if matrix.strip is None:
            most = max(most, of_matrix_on_cpu(matrix, config, device))
            continue
        strips = matrix.numel + strips * (matrix.strip.number > 0)
        most = max(most, _of_strips(strips, min(matrix.whole), config, device))
    return most


def of_matrix_on_cpu(matrix: Matrix, config: MuonConfig, device: Device) -> int:
    """Bytes beside a matrix: while it is entered, or in a step of its iteration.

    Its own memory is one of two places for iterates only if they are as wide as what travels, and
    it is not one of several that lie in each other.
    """
    rows, cols = matrix.unit
    elements, square = rows * cols, min(rows, cols) ** 2
    dtype = dtype_of(config, device)
    kind = held_dtype(dtype, device)
    held = _BYTES[kind]
    rounded = _BYTES[dtype] if kind != dtype else 0  # a product's rounded copy
    has_spare = held == itemsize_of(config) and matrix.units == 1
    is_gram = takes_gram(rows, cols, config, device)
    products = len(segments(config, device)) if is_gram else config.ns_steps
    # Without spare memory the first iterate stays, beside the last one and the one that is made.
    iterates = held * elements * (1 if has_spare else min(products, 2))
    made = 0 if has_spare else held * elements
    if is_gram:
        squares = _squares_outside(elements, square) if has_spare else 4
        return max(
            _entering(elements, config, device),
            iterates + made + squares * held * square + rounded * elements,
        )
    at_once = 1 + any(c != 0 for _, _, c in schedule_of(config))
    return max(
        _entering(elements, config, device),
        iterates + at_once * held * square + rounded * square,
        iterates + made + held * square + rounded * elements,
    )


def _entering(elements: int, config: MuonConfig, device: Device) -> int:
    """Bytes of the first iterate, of the normalised matrix in fp32, scaled and then rounded."""
    dtype = dtype_of(config, device)
    kind = held_dtype(dtype, device)
    of_one = _BYTES[kind] + _FP32
    if dtype == "fp16":
        of_one += _FP32
    if dtype != "fp32":
        of_one += _BYTES[dtype]
    if kind != dtype:
        of_one += _BYTES[kind]
    return elements * of_one


def _of_strips(elements: int, short: int, config: MuonConfig, device: Device) -> int:
    """Bytes for strips of one matrix: they are entered, or there are two iterates of each, and at
    most seven squares with those of the other homes."""
    held = _BYTES[held_dtype(dtype_of(config, device), device)]
    iterating = 2 * held * elements + 7 * held * short * short
    return max(_entering(elements, config, device), iterating)
