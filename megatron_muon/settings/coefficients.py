"""Coefficient sets of the Newton-Schulz iteration, as published: plain numbers with
their sources.

A set is a list of triples (a, b, c), one per step: X ← aX + (bA + cA²)X with A = XXᵀ,
which takes every singular value σ to aσ + bσ³ + cσ⁵.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, cycle, islice, repeat
from typing import Literal, NamedTuple

from megatron_muon.settings import left

Triple = tuple[float, float, float]
CoefficientName = Literal["simple", "quintic", "polar_express", "deepseekv4"]
Coefficients = CoefficientName | tuple[Triple, ...]
Given = Coefficients | Triple
After = Literal["cycle", "repeat_last"]
NsDtype = Literal["bf16", "fp16", "fp32"]

_NAME = "ns_coefficients (--muon-ns-coefficients)"  # in errors

# NVIDIA's Emerging-Optimizers has these sets in its tables. It also defines the steps
# after a list's last triple (get_coefficient_iterator, newton_schulz).
_EMERGING = (
    "https://github.com/NVIDIA-NeMo/Emerging-Optimizers/blob/"
    "fd7729267109a8848709e9406bf19e53e970c3f4/emerging_optimizers/orthogonalized_optimizers/"
    "muon_utils.py"
)
# A rounding unit of each dtype, and the largest singular value that any step may make.
# In fp16 an iterate has norm 128, and parts of its square may be added in fp16, which
# ends at 65,504.
_BOUNDS: dict[NsDtype, tuple[float, float]] = {
    "bf16": (2.0**-8, 10.0),
    "fp16": (2.0**-11, 1.999),
    "fp32": (2.0**-22, 10.0),
}


# The Gram iteration's error is at most GRAM_ERROR times the standard iteration's in the
# same dtype, or times this where that has less. Its largest singular value is at most
# GRAM_TOP times as large. Errors are relative, in Frobenius norm. This holds for 10,000
# drawn matrices, as GPUs and CPUs round them (tests/figures/restart_errors.py).
GRAM_LEAST: dict[NsDtype, float] = {"bf16": 2.0**-4, "fp16": 2.0**-6, "fp32": 2.0**-20}
GRAM_ERROR, GRAM_TOP = 12.0, 1.4
DEFAULT_STEPS = 5  # the paper's, for every set that does not need more


class Restarts(NamedTuple):
    """The steps after which the Gram iteration restarts, by dtype.

    None: with no list that saves a product with the long side, the error stays within
    ``GRAM_ERROR``.
    """

    bf16: tuple[int, ...] | None  # X and the square matrices are in this dtype
    fp16: tuple[int, ...] | None
    fp32: tuple[int, ...] | None
    # X in 16 bits, squares in fp32, as on most CPUs
    fp32_squares: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CoefficientSet:
    """A published list of coefficients."""

    triples: tuple[Triple, ...]  # (a, b, c) of each step
    after: After = "cycle"  # for steps beyond the list's end
    source: str = ""  # the paper or post, and the place of the numbers in it
    steps: int = 0  # the number of steps that the set is made for; 0: any
    # (smallest, largest) singular value, of a matrix of Frobenius norm 1, that
    # ``steps`` bring into ``band``: the source's, or else the widest for its band
    # (tests hold both)
    interval: tuple[float, float] = (0.0, 1.0)
    # absolute values that it is brought to, in exact arithmetic
    band: tuple[float, float] = (0.0, math.inf)
    fewest: int = 1  # with fewer steps it is another set, or has none of its last
    # by the number of steps, as tests/figures/restart_errors.py finds them; others are
    # not tested
    restarts: dict[int, Restarts] = field(default_factory=dict)


SIMPLE: Triple = (3.4445, -4.7750, 2.0315)
SETS: dict[CoefficientName, CoefficientSet] = {
    "simple": CoefficientSet(
        triples=(SIMPLE,),
        # The post aims at [0.7, 1.3] with the steepest start; its figure has 0.68 to
        # 1.13.
        source="https://kellerjordan.github.io/posts/muon; "
        "https://github.com/KellerJordan/Muon/"
        "blob/f90a42b28e00b8d9d2d05865fe90d9f39abcbcbd/muon.py#L5",
        steps=5,
        interval=(2e-3, 1.0),
        band=(0.68, 1.21),
        restarts={
            4: Restarts(bf16=(1, 2), fp16=(2,), fp32=(1, 3), fp32_squares=()),
            5: Restarts(bf16=(1, 2, 3), fp16=(2,), fp32=(1, 2, 3), fp32_squares=()),
        },
    ),
    "quintic": CoefficientSet(
        triples=(
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        source="You Jiacheng, "
        "https://x.com/YouJiacheng/status/1905861218138804534; https://"
        "github.com/KellerJordan/modded-nanogpt/blob/0674386070ceb4dcd207e1aca747ffcea6c15250/"
        "train_gpt_medium.py#L45",
        steps=5,
        interval=(3e-3, 1.0),
        band=(0.97, 1.15),
        restarts={
            5: Restarts(bf16=(1, 2, 3), fp16=(2,), fp32=(1, 2, 3), fp32_squares=(2,))
        },
    ),
    "polar_express": CoefficientSet(
        # The paper's list for [1e-3, 1]. As in its Algorithm 1, arguments are divided
        # by 1.01 against rounding. The list converges to the eighth triple, (15/8,
        # -10/8, 3/8).
        triples=(
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        after="repeat_last",
        source=f"arXiv 2505.16932, Algorithm 1; {_EMERGING}",
        steps=8,
        interval=(1e-3, 1.0),
        band=(0.99, 1.01),
        restarts={
            5: Restarts(bf16=(1, 2, 3), fp16=(1, 3), fp32=(1, 2, 3), fp32_squares=(3,)),
            8: Restarts(
                bf16=(1, 2, 3, 5), fp16=(1, 2, 4), fp32=(1, 2, 3, 4), fp32_squares=(3,)
            ),
            10: Restarts(
                bf16=(1, 2, 3, 5, 7),
                fp16=(1, 3, 7),
                fp32=(1, 2, 3, 4, 7),
                fp32_squares=(3,),
            ),
        },
    ),
    "deepseekv4": CoefficientSet(
        triples=(SIMPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        after="repeat_last",
        source="https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro/resolve/main/"
        f"DeepSeek_V4.pdf; {_EMERGING}",
        steps=10,
        interval=(1e-4, 1.0),
        band=(0.99, 1.01),
        fewest=10,  # its first eight steps are simple's
        restarts={
            10: Restarts(
                bf16=None, fp16=(1, 3, 5, 7), fp32=(1, 3, 4, 5, 7, 8), fp32_squares=(5,)
            ),
        },
    ),
}


def canonical(value: object) -> Coefficients:
    """A set's name, or the triples of a custom list; a triple by itself is a list of
    one.

    The triple of ``simple`` becomes that name: settings saved before sets had names
    stay equal.

    Raises:
        TypeError: it is none of these.
        ValueError: no set has the name, the list is empty, or a number is not finite.
    """
    if isinstance(value, str):
        if value in left.SETS:
            raise ValueError(
                f"{_NAME} {value!r}: this set was removed; its numbers still work, "
                f"--muon-ns-coefficients '{left.SETS[value]}'"
            )
        if value not in SETS:
            raise ValueError(
                f"{_NAME} must be one of {', '.join(SETS)}, or numbers (a, b, c) or a "
                f"tuple of such; got {value!r}"
            )
        return value
    if not isinstance(value, tuple):
        raise TypeError(
            f"{_NAME} must be a set's name, a tuple of three numbers or a tuple "
            f"of such, got {value!r}"
        )
    triples = value if value and isinstance(value[0], tuple) else (value,)
    steps = tuple(_triple(triple) for triple in triples)
    return "simple" if steps == (SIMPLE,) else steps


def set_of(given: Given) -> CoefficientSet:
    """The set of that name; a custom list as a set, without restarts."""
    coefficients = canonical(given)
    if isinstance(coefficients, str):
        return SETS[coefficients]
    count = len(coefficients)
    return CoefficientSet(triples=coefficients, steps=count if count > 1 else 0)


def default_steps(given: Given) -> int:
    """The number of steps where none is given."""
    return max(DEFAULT_STEPS, set_of(given).fewest)


def as_run(given: Given, steps: int) -> Coefficients:
    """The coefficients that so many steps use.

    Fewer steps than a set's ``fewest`` use its first triples only.
    """
    chosen = set_of(given)
    if steps >= chosen.fewest:
        return canonical(given)
    first = chosen.triples[:steps]
    return canonical(first[0]) if len(set(first)) == 1 else first


def require_whole(given: Given, steps: int) -> None:
    """Raise ValueError for so few steps that a set's name would mislead: they are
    another set's, or lack its last.
    """
    used = as_run(given, steps)
    if used == canonical(given):
        return
    what = f"{used} alone" if isinstance(used, str) else "without its last step"
    fewest = default_steps(given)
    raise ValueError(
        f"{_NAME} {given!r} has {fewest} steps, and ns_steps (--muon-ns-steps) is "
        f"{steps}, with which it is {what}: give {fewest}, or --muon-ns-coefficients "
        f"'{spelled(used)}', which computes the same"
    )


@lru_cache(1024)
def schedule(given: Given, steps: int) -> tuple[Triple, ...]:
    """(a, b, c) of each step."""
    chosen = set_of(given)
    triples = chosen.triples
    beyond = repeat(triples[-1]) if chosen.after == "repeat_last" else cycle(triples)
    return tuple(islice(chain(triples, beyond), steps))


def require_bounded(given: Given, steps: int, dtype: NsDtype) -> None:
    """Raise ValueError unless every step keeps singular values far below what
    overflows.

    A matrix starts with norm 1. In each step rounding may move a value beyond the
    largest of the step before, so each polynomial is taken up to one unit of the dtype
    above that.
    """
    unit, most = _BOUNDS[dtype]
    largest = 1.0
    for step, triple in enumerate(schedule(given, steps), 1):
        largest = _largest(triple, largest * (1 + unit))
        if not largest <= most:
            raise ValueError(
                f"{_NAME} {spelled(given)!r}: step {step} of {steps} takes singular "
                f"values up to {largest:.3g}. Beyond {most:g} a step in {dtype} may "
                "overflow: give numbers that keep them near 1, or a set: "
                f"{', '.join(SETS)}"
            )


def _largest(triple: Triple, stop: float) -> float:
    """The largest absolute value of the polynomial of a step on [0, stop]."""
    a, b, c = triple
    # Its extrema are where a + 3bt + 5ct² = 0, with t the square of a singular value.
    q = -(3 * b + math.copysign(math.sqrt(max(0.0, 9 * b * b - 20 * a * c)), b)) / 2
    roots = [top / bottom for top, bottom in ((q, 5 * c), (a, q)) if bottom != 0]
    places = [stop, *(math.sqrt(t) for t in roots if 0 < t < stop * stop)]
    return max(abs(a * s + b * s**3 + c * s**5) for s in places)


def parse(text: str) -> Coefficients:
    """Coefficients of a text, a name, ``a,b,c`` or ``a,b,c;a,b,c;...``; a ValueError
    for others.
    """
    if not any(sign in text for sign in ",;"):
        return canonical(text)
    try:
        triples = tuple(
            tuple(float(n) for n in part.split(",")) for part in text.split(";")
        )
        return canonical(triples)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"coefficients are a name or a,b,c;a,b,c;..., got {text!r}"
        ) from error


def spelled(given: Given) -> str:
    """The text that ``parse`` reads as these coefficients."""
    coefficients = canonical(given)
    if isinstance(coefficients, str):
        return coefficients
    return ";".join(
        ",".join(f"{number!r}" for number in triple) for triple in coefficients
    )


def _triple(value: object) -> Triple:
    if not isinstance(value, tuple) or len(value) != 3:
        raise TypeError(f"{_NAME} must be a tuple of three numbers, got {value!r}")
    for number in value:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"{_NAME} must be a number, got {number!r}")
        # an int may be larger; NaN is not smaller
        if not abs(number) <= sys.float_info.max:
            raise ValueError(f"{_NAME} must be finite, got {number}")
    a, b, c = value
    return float(a), float(b), float(c)
