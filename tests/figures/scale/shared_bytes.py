"""Whether few bytes and even work go together where ranks share matrices.

``cd tests && python -m figures.scale.shared_bytes``

Llama-3-8B at TP1 × DP512. All matrices of a kind have as many homes, 1 to 16, by the standard or
the Gram iteration, with whole squares or rows of them. This counts the work of the busiest home
over the mean of that step, and the least bytes that any placement sends beside those of whole
matrices at the homes that send least:

- strips lie where their elements are, as far as their homes hold them. A range of columns lies
  nowhere in one piece, so each home of a wide matrix keeps only its part of what it holds;
- homes add their squares, once in each of five steps of the standard iteration, or once and after
  the one restart of Gram's. Only the upper half travels, in 16 bits: ``homes - 1`` there and as
  many back;
- rows of squares are put together once in each of five steps.

A row is the least bytes at which the busiest home has at most so many times the mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_muon.config import MuonConfig
from megatron_muon.orthogonalize.iteration import Device, ns_flops, symmetric_flops

RANKS, LAYERS, ELEMENTS = 512, 32, 8_030_261_248
KINDS = {"fc1": (28672, 4096), "fc2": (4096, 14336), "q": (4096, 4096), "proj": (4096, 4096)}
SMALL = 2 * [(1024, 4096)]  # k and v of a layer stay whole
HOMES = range(1, 17)
ITEM, SUMS, STEPS = 2, 2, 5
LIMITS = (1.5, 1.75, 2.0, 3.0, 4.0)
BUCKETS = {"8 buckets": 8, "one bucket": 1}
PRODUCTS: dict[str, Device] = {"torch's products": "cuda", "a library's kernel": "cuda_symmetric"}


@dataclass(frozen=True, slots=True)
class Shared:
    """A kind of matrix on some homes: flops of each, and the least bytes."""

    homes: int
    flops: float
    nbytes: float


def shared(size: tuple[int, int], device: Device, held: float) -> Iterator[Shared]:
    """All ways to share a matrix of which a rank holds at most ``held`` elements.

    The first one is to leave it whole, by the iteration with less work.
    """
    short, elements = min(size), size[0] * size[1]
    square = symmetric_flops(short, short, device)
    alone = symmetric_flops(short, max(size), device) + 2 * short * elements  # square and product
    yield Shared(1, ns_flops(*size, MuonConfig(), device), _moved(size, 1, held))
    for homes in HOMES[1:]:
        moved = _moved(size, homes, held)
        a_sum = ITEM * 2 * (homes - 1) * short * short / 2
        yield Shared(homes, STEPS * (alone / homes + square), moved + STEPS * a_sum)
        gram = ns_flops(*size, MuonConfig(ns_iteration="gram"), device)
        products, own = gram - SUMS * alone, SUMS * alone / homes
        yield Shared(homes, own + products, moved + SUMS * a_sum)
        rows = ITEM * STEPS * (homes - 1) * short * short
        full = products * 2 * short**3 / square  # rows of a square are not symmetric
        yield Shared(homes, own + full / homes, moved + SUMS * a_sum + rows)


def _moved(size: tuple[int, int], homes: int, held: float) -> float:
    """Bytes of elements that go to other ranks and back."""
    elements = size[0] * size[1]
    kept = min(1.0, homes * held / elements)
    if homes > 1 and size[0] < size[1]:
        kept /= homes
    return 2 * ITEM * elements * (1 - kept)


def least(device: Device, buckets: int) -> dict[float, float]:
    """The least bytes over those of whole matrices, by the limit on the busiest home's work."""
    held = ELEMENTS / RANKS / buckets
    ways = [list(shared(size, device, held)) for size in KINDS.values()]
    small = sum(ns_flops(*size, MuonConfig(), device) for size in SMALL)
    off = sum(ways_of[0].nbytes for ways_of in ways)
    found = dict.fromkeys(LIMITS, float("inf"))
    for chosen in itertools.product(*ways):
        mean = LAYERS * (small + sum(one.homes * one.flops for one in chosen)) / RANKS
        busiest = max(one.flops for one in chosen) / mean
        nbytes = sum(one.nbytes for one in chosen) / off
        for limit in LIMITS:
            if busiest <= limit:
                found[limit] = min(found[limit], nbytes)
    return found


def main() -> None:
    """Print the bound for each way to multiply and to cut buffers."""
    print(f"| busiest / mean at most | {' | '.join(f'{limit:g}' for limit in LIMITS)} |")
    print("|---" + "|--:" * len(LIMITS) + "|")
    for (said, device), (cut, buckets) in itertools.product(PRODUCTS.items(), BUCKETS.items()):
        found: dict[float, float] = least(device, buckets)
        print(f"| {said}, {cut} | {' | '.join(f'{found[limit]:.2f}' for limit in LIMITS)} |")


if __name__ == "__main__":
    main()
