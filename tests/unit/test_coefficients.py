"""The published coefficient sets: their numbers against the papers', their intervals,
what they do.

``PUBLISHED`` is written from the papers and the code they point to, and shares nothing
with the package.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from megatron_muon.orthogonalize.newton_schulz import orthogonalize
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.settings.coefficients import (
    SETS,
    NsDtype,
    default_steps,
    parse,
    schedule,
    spelled,
)
from megatron_muon.settings.config import MuonConfig
from support.expected.oracle import newton_schulz
from support.megatron_lm.flag_parsers import config_of


def _triples(text: str) -> list[tuple[float, ...]]:
    """The numbers of each line."""
    return [tuple(map(float, line.split())) for line in text.strip().splitlines()]


SIMPLE = (3.4445, -4.7750, 2.0315)
QUINTIC = _triples(
    """
    4.0848 -6.8946 2.9270
    3.9505 -6.3029 2.6377
    3.7418 -5.5913 2.3037
    2.8769 -3.1427 1.2046
    2.8366 -3.0525 1.2012
    """
)
# arXiv 2505.16932: the list for [1e-3, 1]; Algorithm 1 divides by 1.01, to a power of
# each term's.
POLAR_EXPRESS = _triples(
    """
    8.28721201814563 -23.595886519098837 17.300387312530933
    4.107059111542203 -2.9478499167379106 0.5448431082926601
    3.9486908534822946 -2.908902115962949 0.5518191394370137
    3.3184196573706015 -2.488488024314874 0.51004894012372
    2.300652019954817 -1.6689039845749518 0.4188073119525673
    """
)
PUBLISHED = {
    "simple": [SIMPLE] * 12,
    "quintic": QUINTIC * 3,  # starts over
    "deepseekv4": [SIMPLE] * 8 + [(2.0, -1.5, 0.5)] * 4,
    "polar_express": [
        (a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in POLAR_EXPRESS
    ],
}
# of Emerging-Optimizers' table
REMOVED_SETS = {
    "cans": _triples(
        """
        8.4703 -25.1081 18.6293
        4.1828 -3.1087 0.5806
        3.9619 -2.9541 0.5630
        3.2866 -2.4647 0.5074
        2.2737 -1.6447 0.4162
        """
    ),
    "aol": _triples(
        """
        4.0098 -7.0585 2.4635
        3.4585 -5.5479 2.5959
        2.7573 -3.2939 1.4254
        2.7215 -3.0494 1.3169
        """
    ),
    "cubic5": _triples(
        """
        3.3656576 -3.3420992 0.0
        2.5744352 -1.4957376 0.0
        2.5368962 -1.4312570 0.0
        2.4418906 -1.2764040 0.0
        2.2230472 -0.9630650 0.0
        """
    ),
}


@pytest.mark.parametrize("steps", [3, 5, 12])
@pytest.mark.parametrize("name", SETS)
def test_the_numbers_are_the_published_ones(name: str, steps: int) -> None:
    """Cut after four decimals, as Emerging-Optimizers' table of Polar Express is."""
    for ours, theirs in zip(schedule(name, steps), PUBLISHED[name], strict=False):
        assert ours == pytest.approx(theirs, abs=1e-4 if name == "polar_express" else 0)


@cache
def _through(name: str) -> tuple[Tensor, Tensor]:
    """Singular values from 1e-6 to 1, and what the set's own steps make of them, in
    float64.
    """
    sigma = torch.logspace(-6, 0, 300_001, dtype=torch.float64)
    made = sigma.clone()
    for a, b, c in schedule(name, SETS[name].steps):
        made = a * made + b * made**3 + c * made**5
    return sigma, made


@pytest.mark.parametrize("name", SETS)
def test_a_set_brings_its_interval_into_its_band(name: str) -> None:
    sigma, made = _through(name)
    lower, upper = SETS[name].interval
    inside = made[(sigma >= lower) & (sigma <= upper)].abs()
    smallest, largest = SETS[name].band
    assert smallest <= inside.min() and inside.max() <= largest
    assert made.max() <= largest  # what is smaller stays smaller


@pytest.mark.parametrize("name", [name for name in SETS if name != "polar_express"])
def test_the_interval_is_as_wide_as_the_band_allows(name: str) -> None:
    """Ten times further down the band is left: the interval says what the set is for.
    Eight steps of Polar Express go beyond the 1e-3 that its authors name.
    """
    sigma, made = _through(name)
    assert made[sigma >= SETS[name].interval[0] / 10].abs().min() < SETS[name].band[0]


@pytest.mark.parametrize(
    "shape", [(24, 40), (40, 24), (32, 32), (1, 7), (7, 1), (65, 130)]
)
@pytest.mark.parametrize("name", SETS)
def test_fp32_equals_the_oracle(name: str, shape: tuple[int, int]) -> None:
    """p amplifies a relative error of a small σ by at most its slope at 0, the product
    of the a's: 485 in five steps of simple, 977 of polar_express, 79,263 in ten of
    deepseekv4. The sums' terms are rounded by 2⁻²⁴ of the norm 1 each.
    """
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(*shape, generator=generator)
    # held by the tests above
    triples = schedule(name, default_steps(name))
    exact = newton_schulz(matrix.double(), len(triples), coefficients=triples)
    config = MuonConfig(ns_coefficients=name, ns_dtype="fp32")
    error = (orthogonalize(matrix, config).double() - exact).norm()
    slope = math.prod(a for a, _, _ in triples)
    assert error <= slope * max(shape) * 2.0**-24


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", SETS)
def test_small_and_nearly_singular_matrices_stay_in_the_band(
    name: str, dtype: str
) -> None:
    """1 to 4 rows and columns: σ lies anywhere up to 1.

    Two units of bf16 (2⁻⁷) above the band are rounding of the last step.
    """
    config = MuonConfig(ns_coefficients=name, ns_steps=SETS[name].steps, ns_dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for _ in range(150):
        rows, cols = torch.randint(1, 5, (2,), generator=generator).tolist()
        made = orthogonalize(torch.randn(rows, cols, generator=generator), config)
        assert torch.linalg.matrix_norm(made.double(), 2) <= SETS[name].band[1] * (
            1 + 2.0**-7
        )


@pytest.mark.parametrize("name", SETS)
def test_without_a_number_a_set_has_five_steps_and_deepseekv4_its_ten(
    name: Any,
) -> None:
    """Its first eight are simple's, so five of them were simple under another name."""
    wanted = 10 if name == "deepseekv4" else 5
    made = MuonConfig(ns_coefficients=name, ns_dtype="fp32")
    changed = replace(MuonConfig(ns_dtype="fp32"), ns_coefficients=name)
    by_flag = config_of("0.19", "--muon-coefficient-type", name, "--muon-ns-dtype fp32")
    assert made == changed == by_flag and made.ns_steps == wanted
    assert Numerics(made).steps == schedule(name, wanted)


@pytest.mark.parametrize("steps", range(1, 10))
def test_fewer_steps_of_deepseekv4_are_an_error_with_the_coefficients_that_they_are(
    steps: int,
) -> None:
    said = r"'deepseekv4' has 10 steps, and ns_steps .* is \d, with which it is (.*): give 10, or "
    given = ["--muon-ns-coefficients", "deepseekv4", "--muon-num-ns-steps", str(steps)]
    with pytest.raises(ValueError, match=said) as refused:
        MuonConfig(ns_coefficients="deepseekv4", ns_steps=steps)
    with pytest.raises(ValueError, match=said):
        config_of("0.19", *given)
    text = str(refused.value)
    assert ("simple alone" in text) == (steps < 9)
    same = parse(text.split("--muon-ns-coefficients '")[1].split("'")[0])
    assert schedule(same, steps) == schedule("deepseekv4", steps)
    MuonConfig(ns_coefficients=same, ns_steps=steps)  # what it proposes is accepted


def test_a_custom_list_starts_over() -> None:
    numbers = ((2.0, -1.5, 0.5), (1.5, -0.5, 0.0))
    config = MuonConfig(ns_coefficients=numbers, ns_steps=3, ns_dtype="fp32")
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    exact = newton_schulz(matrix.double(), 3, coefficients=[*numbers, numbers[0]])
    assert (orthogonalize(matrix, config).double() - exact).norm() <= 8 * 9 * 2.0**-24


@pytest.mark.parametrize(
    "given", ["quintic", ((1.0, -2.5, 0.1),), ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))]
)
def test_what_is_spelled_is_parsed_again(given: object) -> None:
    assert parse(spelled(given)) == given  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "numbers, dtypes, said",
    [
        (
            (1.0, 2.0, 3.0),
            ("bf16", "fp16", "fp32", None),
            "takes singular values up to ",
        ),
        (
            ((2.0, -1.5, 0.5), (1e300, 0.0, 0.0)),
            ("fp32",),
            r"step 2 of 5 .* up to 1e\+300",
        ),
        # 3σ - 4σ³ is largest at 1/2, and is 1 there and at 1; rounding passes these
        ((3.0, -4.0, 1e-20), ("bf16", "fp16", None), "step 4 of 5"),
        # without a divisor of arguments
        (tuple(REMOVED_SETS["cans"]), ("bf16", "fp16", None), "step [13] of 5"),
    ],
    ids=str,
)
def test_numbers_with_which_rounding_overflows_are_refused(
    numbers: Any, dtypes: tuple[NsDtype | None, ...], said: str
) -> None:
    """Near rank 1 the standard iteration makes infinities and NaN of them."""
    for dtype in dtypes:
        with pytest.raises(ValueError, match=said):
            MuonConfig(ns_coefficients=numbers, ns_dtype=dtype)


@pytest.mark.parametrize("dtype", get_args(NsDtype))
@pytest.mark.parametrize("name", SETS)
def test_no_number_of_steps_of_a_set_overflows(name: Any, dtype: NsDtype) -> None:
    """A check looks at all steps before the last, too."""
    MuonConfig(ns_coefficients=name, ns_steps=100, ns_dtype=dtype)


@pytest.mark.parametrize("name", REMOVED_SETS)
def test_a_removed_set_is_refused_with_numbers_that_compute_the_same(name: str) -> None:
    """In 16 bits cans had arguments divided by 1.01, without which it overflows."""
    with pytest.raises(ValueError, match=f"'{name}': this set was removed") as refused:
        MuonConfig(ns_coefficients=name)  # type: ignore[arg-type]
    text = str(refused.value).split("--muon-ns-coefficients '")[1].split("'")[0]
    for flag in ("--muon-ns-coefficients", "--muon-coefficient-type"):
        with pytest.raises(ValueError, match=re.escape(text)):
            config_of("0.19", flag, name)
    config = config_of("0.19", "--muon-ns-coefficients", text)
    room = 1.01 if name == "cans" else 1
    published = [(a / room, b / room**3, c / room**5) for a, b, c in REMOVED_SETS[name]]
    assert Numerics(config).steps == tuple((published * 2)[:5])
