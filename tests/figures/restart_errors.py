"""What each list of restarts costs in accuracy: ``cd tests && python -m figures.restart_errors``.

For every list of at most two restarts of the Gram iteration with ``simple`` and 5 steps: the worst
error over the inputs of ``figures.restarts``, as a multiple of the one that is
allowed there (twice the standard iteration's in the same dtype, or a fixed one where that is more),
the worst largest singular value as a multiple of the allowed one, and how many inputs miss either.
"""

from __future__ import annotations

import argparse
import itertools

from figures.restarts import _error, _top, _trials, recorded
from megatron_muon.coefficients import schedule
from megatron_muon.orthogonalize.gram import gram_iteration

NAME, STEPS = "simple", 5


def main() -> None:
    """Print a table for each dtype."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dtypes", nargs="*", metavar="bf16|fp16")
    print(f"| restarts, {NAME}, {STEPS} steps | error | largest value | inputs that miss |")
    print("|---|--:|--:|--:|")
    for dtype in parser.parse_args().dtypes or ("bf16", "fp16"):
        triples = schedule(NAME, STEPS, dtype)
        trials = list(_trials(triples, dtype, dtype))
        for count in range(3):
            for restarts in itertools.combinations(range(1, STEPS), count):
                cuts = itertools.pairwise((0, *restarts, STEPS))
                parts = tuple(triples[start:stop] for start, stop in cuts)
                made = [gram_iteration(t.x, parts, t.products).double() for t in trials]
                errors = [_error(m, t.exact) / t.allowed for m, t in zip(made, trials, strict=True)]
                tops = [_top(m) / t.top for m, t in zip(made, trials, strict=True)]
                missed = sum(max(both) > 1 for both in zip(errors, tops, strict=True))
                taken = " (taken)" * (restarts == getattr(recorded(NAME, STEPS), dtype))
                after = ", ".join(map(str, restarts)) or "none"
                print(f"| {dtype}, after {after}{taken} | ", end="")
                print(f"{max(errors):.3g} | {max(tops):.3g} | {missed} of {len(trials)} |")


if __name__ == "__main__":
    main()
