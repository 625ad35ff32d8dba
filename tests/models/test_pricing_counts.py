"""What the time model counts and prices is the plan's and the virtual GPU's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from megatron_muon.lab.pricing import memory
from megatron_muon.lab.pricing.hardware import MICRO, TERA
from megatron_muon.lab.pricing.kernels import _normalisation, newton_schulz
from megatron_muon.lab.pricing.presets import H100
from megatron_muon.lab.pricing.step import (
    StepTime,
    around,
    host_python,
    price_step,
)
from megatron_muon.lab.pricing.strips import newton_schulz_strip
from megatron_muon.lab.pricing.work import WIDE, Optimizer, traffic_of
from megatron_muon.orthogonalize.iteration import makes_rows, ns_flops, strip_flops
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.layout import Strip
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.sharing.speeds import (
    FLOPS_PER_PS,
    KERNEL,
    MEMORY_BYTE,
    MESSAGE,
    NETWORK_BYTE,
    NODE_BYTE,
    PEER,
)
from megatron_muon.planning.sharing.strip_time import strip_time
from megatron_muon.settings.coefficients import NsDtype
from megatron_muon.settings.config import MuonConfig, NsIteration
from megatron_muon.settings.rules import row_of
from megatron_muon.settings.update import ElementwiseBy
from support.gpu.predicted import predicted
from support.small_squares import rows_of_small_squares
from support.virtual_gpu.plans import flags_of, small_plan
from support.virtual_gpu.runs import Run, record_megatron
from support.virtual_gpu.step import record_step
from support.virtual_gpu.trace import Kernel

CONFIG = MuonConfig(preset="fast")
MIB = 1 << 20
SIZES = [(1, 3), (2, 4), (4, 2), (1, 1)]


def plan_of(config: MuonConfig = CONFIG, tp: int = 1, dp: int = 2, **more: int) -> Any:
    """Of layers with products of several tiles."""
    return small_plan(config, tp, dp, **{"hidden": 512, "ffn": 1280, **more})


def priced(plan: ExchangePlan, config: MuonConfig) -> StepTime:
    return price_step([Optimizer(plan, (0,) * plan.size)], config, H100)


def launches_and_price(plan: ExchangePlan, config: MuonConfig) -> tuple[int, StepTime]:
    """Of two steps on rank 0, in which the host waits for nothing and nothing races."""
    recording = record_step(plan, 0, config, steps=2)
    assert recording.host_syncs == [] and recording.races == []
    return recording.launches, priced(plan, config)


def test_bytes_within_a_node_and_between_nodes_are_counted_separately() -> None:
    plan = small_plan(CONFIG, 2, 4)
    nodes = ([rank // node for rank in range(plan.size)] for node in (1, 8, 4))
    alone, all_near, halves = (traffic_of([plan], each) for each in nodes)
    assert sum(alone.inside) == 0 == sum(all_near.between)
    assert alone.between == all_near.inside
    assert 0 < sum(halves.inside) < sum(all_near.inside)
    assert halves.sent == all_near.sent


@pytest.mark.parametrize(
    "hidden, iteration", [(512, "standard"), (512, "gram"), (8192, "gram")]
)
@pytest.mark.parametrize("tp, strips", [(1, 4), (2, 4), (2, 2)])
def test_launches_of_shared_matrices_are_nearly_those_of_the_virtual_gpu(
    hidden: int, tp: int, strips: int, iteration: NsIteration
) -> None:
    """The model has none that depend on a home's place, or on what its strips round to.

    Homes of the wide ones make rows of squares.
    """
    config = MuonConfig(split_matrices=strips, ns_iteration=iteration)
    plan = small_plan(
        config, tp, strips // tp, layers=1, hidden=hidden, ffn=5 * hidden // 2
    )
    assert any(any(one.gathers) for one in plan.shared) == (hidden > 512)
    recorded = record_step(plan, 0, config, steps=2).launches
    assert abs(priced(plan, config).launches - recorded) < 0.1 * recorded


def test_norm_clip_and_copy_have_the_virtual_gpus_bytes() -> None:
    """And copies are launched one by one, which the host pays for."""
    run = Run(dp=1, overlap=False, clip=1e-9)
    moved = Counter[str]()
    copies = 0
    for event in record_megatron(run, 0).step:
        if isinstance(event, Kernel) and event.phase == "optimizer/step":
            spans = (*event.reads, *event.writes)
            moved[event.name] += sum(stop - start for _, start, stop in spans)
            copies += event.name == "copy_"
    expected = predicted(flags_of(run.words()), MuonConfig(), "cuda")
    seconds = around(expected.optimizers, H100)
    for name, kernel in (("norm", "l2norm"), ("clip", "scale")):
        nbytes = moved[f"multi_tensor_{kernel}"]
        assert seconds[name] * H100.memory == pytest.approx(nbytes, abs=4.1), name
    assert seconds["copy"] * H100.memory == pytest.approx(moved["copy_"])
    shard = (H100.shard_us + H100.launch_us) * MICRO
    assert 1 < host_python(expected.optimizers, H100) / shard < copies
    packed = [replace(one, held=WIDE._replace(main=2)) for one in expected.optimizers]
    assert around(packed, H100) == seconds | {"copy": 0.0}


@pytest.mark.parametrize("elementwise", ["auto", "foreach"])
def test_a_momentum_in_int8_costs_its_launches_and_bytes_and_waits_for_nothing(
    elementwise: ElementwiseBy,
) -> None:
    config = replace(CONFIG, elementwise=elementwise)
    plan = plan_of(config)
    fp32, plain = launches_and_price(plan, config)
    int8, step = launches_and_price(plan, replace(config, momentum_dtype="int8"))
    # the busiest rank's; some slices share a shard here
    shards = plan.for_rank(0).shards.values()
    assert int8 - fp32 == 14 * len(shards)
    assert step.launches - plain.launches >= int8 - fp32
    elements = sum(span.size for span in shards)
    more = step.phases["momentum"] - plain.phases["momentum"]
    assert more >= 62 * elements / H100.memory


def test_second_moments_at_homes_cost_their_launches_and_bytes() -> None:
    """A rank's launches are those of the virtual GPU, or few more."""
    plan = plan_of()
    muons, plain = launches_and_price(plan, CONFIG)
    normuons, step = launches_and_price(plan, replace(CONFIG, rule="normuon"))
    units = sum(matrix.units for matrix in plan.matrices if matrix.home == 0)
    more = step.launches - plain.launches
    assert 0 <= more - (normuons - muons) <= 4 * units
    assert step.phases["newton_schulz"] > plain.phases["newton_schulz"]


@pytest.mark.parametrize("rule", ["hyperball", "namo"])
@pytest.mark.parametrize("tp, dp", SIZES)
def test_sums_over_matrices_cost_their_launches_and_memory(
    rule: str, tp: int, dp: int
) -> None:
    """Launches go by slices, of which a piece has many here."""
    config = replace(CONFIG, rule=rule)
    plan = plan_of(config, tp, dp)
    every = [record_step(plan, rank, config, steps=2) for rank in range(plan.size)]
    recorded = max(one.launches for one in every)
    # Muon's own that the price leaves out, up to 20 a round
    left_out = max(0.1 * recorded, 20 * len(plan.rounds))
    assert priced(plan, config).launches == pytest.approx(recorded, abs=left_out)
    slices = Counter(one.rank for one in plan.slices)
    _check_peaks(plan, config, blocks=3 * max(slices.values()))


def test_second_moments_are_in_the_memory_at_rest() -> None:
    plan = plan_of(layers=2)

    def momenta(rule: str) -> int:
        held = WIDE._replace(of_rule=row_of(rule).moments)
        rest = memory.at_rest([Optimizer(plan, (0, 0), held=held)])
        return sum(of_rank[memory.MOMENTUM] for of_rank in rest)

    long = sum(matrix.units * matrix.long for matrix in plan.matrices)
    assert momenta("normuon") - momenta("muon") == 4 * long


@pytest.mark.parametrize("tp, dp", SIZES)
@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "fast"},
        {"round_bytes": MIB},
        {"ns_iteration": "gram"},
        {"elementwise": "foreach", "round_bytes": MIB},
        {"elementwise": "foreach", "nesterov": False},  # lists for the update only
        {"split_matrices": 2},
        {"split_matrices": 3, "ns_dtype": "bf16"},
        {"split_matrices": 4, "ns_iteration": "gram"},
        {"momentum_dtype": "int8", "round_bytes": MIB},
    ],
    ids=str,
)
def test_the_peak_is_that_of_the_virtual_gpus_allocator(
    tp: int, dp: int, settings: dict[str, Any]
) -> None:
    """The model has no scalars and no tables, and no rounding of blocks to 512
    bytes.
    """
    config = MuonConfig(**settings)
    _check_peaks(plan_of(config, tp, dp, layers=2), config)


@pytest.mark.parametrize(
    "tp, dp, strips, dtype",
    [
        (1, 4, 4, None),
        (2, 4, 4, None),
        (1, 3, 4, None),
        (1, 2, 2, None),
        (1, 2, 2, "fp32"),
        (1, 1, 4, "fp32"),
    ],
)
def test_the_peak_is_that_of_the_allocator_where_homes_make_rows(
    tp: int, dp: int, strips: int, dtype: NsDtype | None
) -> None:
    """Square matrices decide it here, more than those of long ones do.

    In fp32 a sum of squares has no rounded copy, so that of two homes the products
    decide it.
    """
    config = MuonConfig(split_matrices=strips, ns_iteration="gram", ns_dtype=dtype)
    plan = small_plan(config, tp, dp, layers=1, hidden=8192, ffn=16384)
    assert all(
        any(one.gathers) for one in plan.shared if min(one.rows, one.cols) == 8192
    )
    _check_peaks(plan, config, steps_of_first=1)


def _check_peaks(
    plan: ExchangePlan, config: MuonConfig, steps_of_first: int = 2, blocks: int = 32
) -> None:
    """Of the first ranks and the last one, whose shard and strip are others.

    Of a number, which the model does not have, the allocator takes a block of 512
    bytes.
    """
    held = WIDE if config.momentum_dtype == "fp32" else WIDE._replace(momentum=1)
    modelled = memory.peaks([plan], config, held=held)
    for rank in {*range(min(2, plan.size)), plan.size - 1}:
        steps = 1 if rank else steps_of_first  # a second step takes no more
        recorded = record_step(plan, rank, config, steps=steps).peak_bytes
        assert abs(modelled[rank] - recorded) <= 0.02 * recorded + 512 * blocks


LARGE = FLOPS_PER_PS * TERA  # flop/s
SHAPES = [
    (14336, 4096),
    (28672, 4096),
    (28672, 8192),
    (57344, 8192),
    (18432, 7168),
    (7168, 2048),
]


@pytest.mark.parametrize("device", ["cuda", "cuda_symmetric"])
@pytest.mark.parametrize("shape", [*SHAPES, (8192, 8192)])
def test_the_plan_and_the_time_model_have_the_same_price_for_a_strip(
    shape: tuple[int, int], device: Device
) -> None:
    """A plan chooses by differences of a few percent, so its constants may not
    drift. Of a whole matrix it counts products, not the passes of the norm.
    """
    rows, cols = shape
    numerics = Numerics(CONFIG, device)
    whole = newton_schulz(H100, rows, cols, 1, numerics).seconds
    whole -= _normalisation(H100, rows * cols, numerics).seconds
    assert ns_flops(rows, cols, numerics) / LARGE == pytest.approx(whole, rel=0.15)
    for count in (2, 4, 8):
        strip = Strip(rows, cols, 0, count)
        own = strip_time(strip, rows * cols // count, 64, numerics)
        long = rows // count
        flops = strip_flops(rows, cols, long, numerics, number=0, count=count)
        strips = newton_schulz_strip(H100, shape, long, count, count, numerics)
        planned = (flops + own) / LARGE
        assert planned == pytest.approx(strips.seconds, rel=0.1), count


def test_the_clocks_speeds_are_the_time_models() -> None:
    for byte, rate, off in (
        (NETWORK_BYTE, H100.network_link, 0.01),
        (NODE_BYTE, H100.node_link, 0.06),
        (MEMORY_BYTE, H100.memory, 0.11),
    ):
        assert FLOPS_PER_PS * TERA / byte == pytest.approx(rate, rel=off)
    for flops, microseconds in (
        (MESSAGE, H100.message_us),
        (PEER, H100.peer_us),
        (KERNEL, H100.kernel_us),
    ):
        assert flops / FLOPS_PER_PS / 1e6 == pytest.approx(microseconds, rel=0.26)


@pytest.mark.parametrize("device", ["cuda", "cuda_symmetric"])
@pytest.mark.parametrize("strips", [2, 4, 8])
@pytest.mark.parametrize("aspect", [2, 4, 7])
def test_homes_compute_rows_of_squares_where_it_is_faster(
    aspect: int, strips: int, device: Device
) -> None:
    """By the time model, but for 5 %: than whole squares at every size, and than rows
    where these are not made.
    """
    for short in (1024, 2048, 4096, 5120, 6144, 7168, 8192, 12288, 16384):
        shape, numerics = (short, aspect * short), Numerics(CONFIG, device)
        given = shape, aspect * short // strips, strips, strips, numerics
        chosen = newton_schulz_strip(H100, *given).seconds
        makes = makes_rows(*shape, strips, numerics)
        with rows_of_small_squares(1 << 30 if makes else 1):
            other = newton_schulz_strip(H100, *given).seconds
        assert chosen <= 1.05 * other or (short in range(4096, 6144) and not makes)
