"""Where the Gram iteration has to restart: ``python -m figures.restarts [SET [STEPS]]``.

The method. A set that is unstable near rank 1, even in float64, gets no list in any dtype. Near
rank 1 the largest singular value is the norm: 1 before X is rounded, up to 1 + 2⁻⁸ after it. The
test is in float64, without headroom. A set is unstable if its polynomials take a value between
these to more than 5 % above their maximum on values up to 1. Headroom may save the standard
iteration, but not this one: it covers the rounding of X, while the rounding of the square of X
grows from step to step.

For any other set and number of steps every list of restarts is tried, the shortest first. The
matrices are 96 × 96, 64 × 256 and 40 × 120: with condition numbers 1 to 1e8; of rank 1, 4 and half
the rows; of rank 1 plus singular values of 1e-1 to 1e-5; with eight equal rows plus noise of 1e-1
or 1e-2; Gaussian. (All ones is left out: all of its entries round alike. So for every list there is
a size at which 16 bits move the result far, though not out of the band.)
A list is accurate if on each matrix

- the error, in Frobenius norm and relative to the exact polynomials of the singular values, is at
  most twice the standard iteration's in the same dtype, or ``_ALLOWED`` where that is more, and
- the largest singular value is at most 5 % above the larger of the exact and standard's.

Standard's figure is the worst of three: with X as it is, and scaled up and down by one rounding
unit of the dtype. Some polynomials are so steep at 1 that one unit changes the result by half.

Among the shortest accurate lists, the one with the smallest worst error, as a fraction of the
allowed error, is taken. The recorded list stays if its worst error is at most 5 % larger. The order
of sums, which depends on the CPU, changes errors by as much. In 16 bits lists with more restarts
than half the steps are not tried. Whoever asks for fp32 asks for accuracy, so there any list counts
that leaves out one product with the long side: at least one segment of two steps. Square matrices
in fp32 also serve an X in 16 bits, with a list of their own that is accurate for bf16 and fp16. An
X in fp32 shows the error of these matrices alone: there the list may have twice standard's error,
or ``_SQUARES_ALLOWED``.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_muon.coefficients import (
    SETS,
    CoefficientName,
    NsDtype,
    Restarts,
    Triple,
    schedule,
)
from megatron_muon.lab.bench.newton_schulz.inputs import exactly, inputs, polynomials
from megatron_muon.orthogonalize.gram import gram_iteration
from megatron_muon.orthogonalize.matmul import Products, scale_of, torch_dtype
from megatron_muon.orthogonalize.newton_schulz import standard_iteration
from megatron_muon.orthogonalize.normalization import normalize

_SHAPES = ((96, 96), (64, 256), (40, 120))
# In bf16 and fp32 16 units of the dtype's rounding. That is a fifth of what simple leaves to a
# polar factor, and about the least error of the standard iteration in fp32.
_ALLOWED: dict[NsDtype, float] = {"bf16": 2.0**-4, "fp16": 2.0**-6, "fp32": 2.0**-20}
_TIMES = 2.0
_SQUARES_ALLOWED = 2.0**-10  # well below one unit of bf16
_NUDGE: dict[NsDtype, float] = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
_TOP = 1.05
_SAME = 1.05  # of worst errors

NONE = Restarts(bf16=None, fp16=None, fp32=None, fp32_squares=None)


@dataclass(frozen=True, slots=True)
class _Trial:
    """One input: X as iterations take it, the exact result, the allowed error and largest value."""

    x: Tensor
    products: Products
    exact: Tensor
    allowed: float
    top: float


def find_restarts(name: CoefficientName, steps: int) -> Restarts:
    """The lists of a coefficient set, as ``coefficients`` has them."""
    if why_unstable(name, steps) is not None:
        return NONE
    return Restarts(
        bf16=_shortest(name, steps, "bf16", ("bf16",)),
        fp16=_shortest(name, steps, "fp16", ("fp16",)),
        fp32=_shortest(name, steps, "fp32", ("fp32",)),
        fp32_squares=_shortest(name, steps, "fp32_squares", ("bf16", "fp16", "fp32")),
    )


def recorded(name: CoefficientName, steps: int) -> Restarts:
    """The lists in ``coefficients``; a pair that is not there has none."""
    return SETS[name].restarts.get(steps, NONE)


def why_unstable(name: CoefficientName, steps: int) -> str | None:
    """Words for polynomials that are unstable near rank 1 in float64; None for stable ones."""
    published = schedule(name, steps, "fp32")  # fp32 has no headroom
    within, above = (
        float(
            polynomials(torch.linspace(*ends, 100_001, dtype=torch.float64), published).abs().max()
        )
        for ends in ((0.0, 1.0), (1.0, 1.0 + _NUDGE["bf16"]))
    )
    if above <= _TOP * within:  # NaN is not
        return None
    return (
        f"unstable near rank 1 in float64: of singular values up to 1 at most {within:.2f}, "
        f"up to 1 + 2⁻⁸ {above:.1e}"
    )


def _shortest(
    name: CoefficientName, steps: int, kind: str, dtypes: Sequence[NsDtype]
) -> tuple[int, ...] | None:
    """The list of one field of ``Restarts``, accurate for X in each of ``dtypes``."""
    kept = getattr(recorded(name, steps), kind)
    trials = {dtype: list(_trials(schedule(name, steps, dtype), dtype, kind)) for dtype in dtypes}
    most = steps - 2 if kind == "fp32" else steps // 2
    for count in range(most + 1):
        candidates: list[tuple[float, tuple[int, ...]]] = []
        for restarts in itertools.combinations(range(1, steps), count):
            cuts = list(itertools.pairwise((0, *restarts, steps)))
            stop = min(1.0, _SAME * min(candidates, default=(1.0, ()))[0])
            worst = 0.0
            for dtype, tried in trials.items():
                triples = schedule(name, steps, dtype)
                parts = tuple(triples[start:stop] for start, stop in cuts)
                worst = max(worst, _worst(tried, parts, stop))
                if worst > stop:
                    break
            if worst <= stop:
                candidates.append((worst, restarts))
        if candidates:
            best, first = min(candidates)
            return kept if (kept in [r for w, r in candidates if w <= _SAME * best]) else first
    return None


def _trials(steps: tuple[Triple, ...], dtype: NsDtype, kind: str) -> Iterator[_Trial]:
    floor, squares = _ALLOWED[dtype], dtype
    if kind == "fp32_squares":
        squares = "fp32"
        if dtype == "fp32":
            floor = _SQUARES_ALLOWED
    scale = scale_of(dtype)
    products = Products(torch_dtype(dtype), torch_dtype(squares), torch.float32, scale)
    for shape in _SHAPES:
        for what, matrix in inputs(*shape):
            if what.startswith(("entries", "all ones")):
                continue  # scale is divided out before the iteration
            x = products.enter(normalize(matrix.float()))
            exact = exactly(matrix, steps)
            standards = [
                standard_iteration(products.enter(x * (factor / scale)), steps, products).double()
                for factor in (1 - _NUDGE[dtype], 1.0, 1 + _NUDGE[dtype])
            ]
            error = max(_error(standard, exact) for standard in standards)
            top = max(map(_top, (exact, *standards)))
            yield _Trial(x, products, exact, max(_TIMES * error, floor), _TOP * top)


def _worst(trials: Sequence[_Trial], parts: tuple[tuple[Triple, ...], ...], stop: float) -> float:
    """The largest error as a fraction of what is allowed; ``inf`` where a value is too large."""
    worst = 0.0
    for trial in trials:
        made = gram_iteration(trial.x, parts, trial.products).double()
        error = _error(made, trial.exact)
        if not error / trial.allowed <= stop or _top(made) > trial.top:  # NaN too
            return float("inf")
        worst = max(worst, error / trial.allowed)
    return worst


def _error(made: Tensor, exact: Tensor) -> float:
    return float((made - exact).norm() / exact.norm())


def _top(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def main() -> None:
    """Print the lists of every number of steps that is recorded, or of those that are asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("set", nargs="?", choices=list(SETS), help="(default: all)")
    parser.add_argument("steps", nargs="?", type=int)
    given = parser.parse_args()
    print((__doc__ or "").strip() + "\n", flush=True)
    for name in [given.set] if given.set else list(SETS):
        for steps in [given.steps] if given.steps else sorted(SETS[name].restarts) or [5]:
            print(f"{name}, {steps} steps: {said(name, steps)}", flush=True)


def said(name: CoefficientName, steps: int) -> str:
    """The lists, why there are none, and whether they are those of ``coefficients``."""
    lists, known = find_restarts(name, steps), recorded(name, steps)
    same = "as recorded" if lists == known else f"NOT as recorded: {known}"
    why = why_unstable(name, steps)
    return f"{'none' if lists == NONE else lists}{f', {why}' if why else ''} ({same})"


if __name__ == "__main__":
    main()
