"""Where the Gram iteration has to restart: ``cd tests && python -m
figures.restart_errors``.

10,000 matrices are drawn (``support.drawn``): columns, rows or halves scaled apart,
rows repeated, near rank 1, of given singular values, Gaussian; of 1 x 1 to 96 x 96 and
64 x 256. Each is rounded as a GPU and a CPU do, and with sums in 16 bits. A list of
restarts is accurate if on each of them the error and the largest singular value are
within ``GRAM_ERROR`` and ``GRAM_TOP`` of ``coefficients``. Standard's error is the
worst of three: with X as it is, and scaled up and down by one rounding unit. Of the
shortest accurate lists, the one farthest from both bounds is taken.

Without arguments it prints the recorded lists' worst figures over the bounds.
``--find`` searches, which takes hours for all sets.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence

from megatron_muon.settings.coefficients import SETS, Restarts
from support.drawn import SHAPES, Trial, trials

COUNT = 10_000
# of which most lists fail
FEW = [n for n in range(2000) if max(SHAPES[n % len(SHAPES)]) <= 16]


def over_bounds(tried: Iterable[Trial], restarts: Sequence[int]) -> tuple[float, float]:
    """The worst error and the worst largest singular value of a list, over what is
    allowed.

    Where one is above 1, it is that of the first trials that have such a one.
    """
    error = top = 0.0
    for trial in tried:
        errors, tops = trial.measured(restarts)
        error = max(error, float(errors.max()))
        top = max(top, float(tops.max()))
        if max(error, top) > 1:
            break
    return error, top


def found(name: str, steps: int, field: str) -> tuple[int, ...] | None:
    """The list of one field of ``Restarts``."""
    few, every = list(trials(name, steps, field, FEW)), None
    for length in range(steps - 1):
        accurate = []
        for restarts in itertools.combinations(range(1, steps), length):
            if max(over_bounds(few, restarts)) > 1:
                continue
            every = every or list(trials(name, steps, field, range(COUNT)))
            worst = max(over_bounds(every, restarts))
            accurate += [(worst, restarts)] if worst <= 1 else []
        if accurate:
            return min(accurate)[1]
    return None


def main() -> None:
    """Print a line for each list."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="SET", default=[*SETS])
    parser.add_argument("--find", action="store_true")
    given = parser.parse_args()
    for name in given.names:
        for steps in SETS[name].restarts or [SETS[name].steps]:
            for field in Restarts._fields:
                recorded = getattr(SETS[name].restarts.get(steps), field, None)
                said = f"{name}, {steps} steps, {field}: {recorded}"
                if given.find:
                    said += f", found {found(name, steps, field)}"
                elif recorded is not None:
                    every = trials(name, steps, field, range(COUNT))
                    error, top = over_bounds(every, recorded)
                    said += f", error {error:.2f}, largest value {top:.2f} of the bound"
                print(said, flush=True)


if __name__ == "__main__":
    main()
