"""The time model: hardware, kernels, rounds and streams, by hand and by property."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.lab.plan.on_host import HostTime, on_host
from megatron_muon.lab.pricing.hardware import CONSTANTS, Hardware, least_of, most_of
from megatron_muon.lab.pricing.kernels import batches, product
from megatron_muon.lab.pricing.paper import price_paper
from megatron_muon.lab.pricing.presets import H100, PRESETS, from_json
from megatron_muon.lab.pricing.step import StepTime, price_adamw, price_step
from megatron_muon.lab.pricing.streams import Streams
from megatron_muon.lab.pricing.upstream import TpMode, price_layer_wise
from megatron_muon.lab.pricing.work import Optimizer, StateBytes, rounds_of
from megatron_muon.orthogonalize.iteration import ns_flops
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.layout import Span
from megatron_muon.planning.plan import ExchangePlan, make_plan
from megatron_muon.settings.config import MuonConfig
from support.sections import whole_parameter
from support.virtual_gpu.plans import small_plan

CONFIG = MuonConfig(preset="fast")
NONE = "kernel_us launch_us phase_us message_us peer_us peer_host_us".split()
# 1e9 bytes/s of memory and of each link; products take no longer than their bytes;
# nothing else.
PLAIN = H100.with_values(
    dict.fromkeys((*NONE, "split_us"), 0.0)
    | dict.fromkeys(("memory_gbytes", "node_gbytes", "network_gbytes"), 1.0)
    | dict.fromkeys(("memory_efficiency", "node_efficiency", "network_efficiency"), 1.0)
    | {"dense_tflops": 1e6, "symmetric_ratio": 1.0},
    "the test",
)


def one_matrix(
    rows: int, cols: int, dp: int, config: MuonConfig = CONFIG, padding: int = 0
) -> ExchangePlan:
    """A matrix in a bucket that is cut into ``dp`` equal shards."""
    bucket = Span(0, rows * cols + padding)
    parameter = whole_parameter("w", (rows, cols), bucket=bucket)
    return make_plan([parameter], RankGrid(((tuple(range(dp)),),)), Numerics(config))


def alone(plan: ExchangePlan) -> list[Optimizer]:
    """Its optimizer, without any parameter of AdamW's."""
    return [Optimizer(plan, (0,) * plan.size)]


def priced(plan: ExchangePlan, hardware: Hardware, **options: Any) -> StepTime:
    return price_step(alone(plan), CONFIG, hardware, **options)


FOREACH = dataclasses.replace(CONFIG, elementwise="foreach")


@pytest.mark.parametrize(
    "config, momentum, update, launches",
    [(CONFIG, 14, 10, 3 + 2 + 12), (FOREACH, 46 + 4, 34, 10 + 4 + 12)],
    ids=["fused", "foreach"],
)
def test_one_matrix_on_one_rank_takes_what_its_kernels_take(
    config: MuonConfig, momentum: int, update: int, launches: int
) -> None:
    """Foreach: momentum 5, a norm, 4 flags; update 4; norms 12. Fused: a kernel each,
    small ones, and norms.

    Norms find the largest entry, divide by a power of two, add squares and divide: six
    passes of two bytes. Nothing travels, so nothing is copied.
    """
    rows, cols = 4, 8
    plan = one_matrix(rows, cols, dp=1)
    elements = rows * cols
    enter = 6 * 2
    # products: XXᵀ, bA + cAA, BX; the second copies its linear term: 2 bytes read, 2
    # written
    operands = [
        (rows, cols, cols, rows, rows, rows),
        (rows, rows, rows, rows, rows, rows),
    ]
    operands.append((rows, rows, rows, cols, rows, cols))
    moved = [2 * (a * b + c * d + e * f) for a, b, c, d, e, f in operands]
    copies = 4 * rows * rows
    newton = elements * enter + 5 * (sum(moved) + copies)
    expected = (elements * (momentum + update) + newton) / 1e9
    step = price_step(alone(plan), config, PLAIN)
    assert step.seconds == pytest.approx(expected, rel=1e-9)
    assert step.newton_schulz_busiest == pytest.approx(newton / 1e9, rel=1e-9)
    assert step.exposed_most == 0
    assert step.launches == launches + 25  # of products, and of their linear terms


def test_two_halves_of_a_matrix_wait_for_their_bytes_and_for_the_home() -> None:
    plan = one_matrix(4, 8, dp=2)
    (home,) = {matrix.home for matrix in plan.matrices}
    half = 16
    # with the flag and what fills up
    there, back = (2 * (half + 8) / 1e9, 2 * half / 1e9)
    one = priced(one_matrix(4, 8, dp=1), PLAIN)
    two = priced(plan, PLAIN)
    momentum, update = half * 14 / 1e9, half * 10 / 1e9
    received = staged = 2 * half * 4 / 1e9  # its own half is copied, too
    at_home = (
        momentum + there + received + one.newton_schulz_busiest + staged + back + update
    )
    assert two.by_rank[home] == pytest.approx(at_home, rel=1e-9)
    assert two.by_rank[1 - home] == pytest.approx(at_home, rel=1e-9)
    waited = at_home - momentum - update  # of the other rank: all that is not its own
    assert two.exposed_most == pytest.approx(waited, rel=1e-9)


def test_ranks_that_share_nothing_wait_for_nobody() -> None:
    """Two ranks with a whole matrix each, one 16 times the other: the small one ends
    early.
    """
    bucket = Span(0, 2 * 128)
    parameters = [
        whole_parameter("large", (8, 16), bucket=bucket),
        whole_parameter("small", (2, 16), start=128, bucket=bucket),
    ]
    plan = make_plan(parameters, RankGrid((((0, 1),),)), Numerics(CONFIG))
    assert [matrix.home for matrix in plan.matrices] == [0, 1]
    (work,) = rounds_of(plan)
    assert not work.gather and not work.scatter
    step = priced(plan, H100)
    assert step.exposed_most == 0
    assert step.by_rank[1] < step.by_rank[0]
    cheap = H100.with_values({"message_us": 1e6, "network_gbytes": 1e-9}, "the test")
    assert priced(plan, cheap) == step


FASTER = "dense_tflops memory_gbytes node_gbytes pair_gbytes network_gbytes".split()
SLOWER = [*NONE, "symmetric_ratio"]


@given(
    name=st.sampled_from(FASTER + SLOWER),
    factor=st.floats(1.01, 100),
    tp=st.sampled_from((1, 2)),
    dp=st.sampled_from((2, 4)),
    round_bytes=st.sampled_from((None, 1 << 15)),
)
def test_more_speed_is_never_slower_and_more_latency_never_faster(
    name: str, factor: float, tp: int, dp: int, round_bytes: int | None
) -> None:
    plan = small_plan(MuonConfig(round_bytes=round_bytes), tp, dp)
    optimizers = [Optimizer(plan, (1000,) * plan.size)] * 2
    value = getattr(H100, name) * factor
    if name == "symmetric_ratio":
        value = min(1.0, value)
    small_node = H100.with_values({"gpus_per_node": 2}, "the test")
    changed = small_node.with_values({name: value}, "the test")
    before, after = (
        price_step(optimizers, CONFIG, hardware).seconds
        for hardware in (small_node, changed)
    )
    if name in FASTER:
        assert after <= before * (1 + 1e-12)
    else:
        assert after >= before * (1 - 1e-12)


def test_a_product_is_never_faster_than_its_flops_and_its_bytes() -> None:
    for rows, cols, inner, batch in (
        (4096, 4096, 14336, 1),
        (768, 2048, 768, 64),
        (8, 8, 8, 1),
    ):
        seconds = product(H100, rows, cols, inner, batch).seconds
        flops = 2 * batch * rows * cols * inner
        moved = 2 * batch * (rows * inner + inner * cols + rows * cols)
        assert seconds >= flops / H100.product_rate("bf16")
        assert seconds >= moved / H100.memory
    # 132 tiles, one wave
    whole = product(H100, 128 * 12, 256 * 11, 4096).seconds - 2.0e-6
    assert whole == pytest.approx(2 * 1536 * 2816 * 4096 / (989.4e12 * 0.76))
    in_fp16 = product(H100, 128 * 12, 256 * 11, 4096, dtype="fp16").seconds - 2.0e-6
    assert in_fp16 == pytest.approx(whole / 0.95)
    in_fp32 = product(H100, 4096, 4096, 4096, dtype="fp32").seconds
    assert in_fp32 > 10 * product(H100, 4096, 4096, 4096).seconds


def test_batches_take_every_matrix_once_and_keep_to_their_room() -> None:
    def taken(ns_batch: int | None, count: int, scratch: int) -> list[tuple[int, int]]:
        return list(batches(768, 2048, count, ns_batch=ns_batch, scratch=scratch))

    assert taken(1, 5, 0) == [(1, 5)]
    assert taken(16, 40, 0) == [(16, 2), (8, 1)]
    of_one = 768 * 2048 + 2 * 768 * 768  # its next iterate, and two squares
    assert taken(None, 100, 42 * of_one) == [(42, 2), (16, 1)]
    assert taken(None, 100, 42 * of_one - 1) == [(41, 2), (18, 1)]
    assert taken(None, 2, 0) == [(1, 2)]


def test_a_peer_that_sends_to_many_has_a_share_of_its_link_for_each() -> None:
    streams = Streams(PLAIN, 4)
    pairs = {(0, 1): 1000, (0, 2): 1000, (0, 3): 1000}
    ends = streams.exchange(pairs)
    assert ends == dict.fromkeys(range(4), pytest.approx(3e-6))


def test_adamw_takes_its_bytes() -> None:
    plan = one_matrix(1024, 1024, dp=2)
    seconds = price_adamw([Optimizer(plan, (1 << 20, 0))], PLAIN)
    assert seconds == pytest.approx(((1 << 20) + (1 << 19)) * 28 / 1e9)


QUICK = PLAIN.with_values(
    {"memory_gbytes": 1e6, "node_gbytes": 1e6, "dense_tflops": 1.0}, "the test"
)


@pytest.mark.parametrize("device", ["cuda", "cuda_symmetric"])
def test_upstream_s_modes_divide_the_work_of_a_matrix_over_tp(device: Any) -> None:
    """Duplicated does all of it on every rank, blockwise and distributed a slice's,
    layer_sharded that of its own matrices. Only blockwise sends nothing.
    """
    plan, whole = (small_plan(CONFIG, tp, 1) for tp in (4, 1))
    one = price_layer_wise(alone(whole), CONFIG, QUICK, "duplicated", device)[0]
    most = {
        mode: price_layer_wise(alone(plan), CONFIG, QUICK, mode, device)
        for mode in get_args(TpMode)
    }
    assert most["duplicated"][0].flops == one.flops
    assert most["duplicated"][0].seconds == pytest.approx(one.seconds, rel=0.05)
    assert {mode for mode, (each, _) in most.items() if each.sent == 0} == {"blockwise"}
    assert most["layer_sharded"][1].flops * 4 == pytest.approx(one.flops)
    assert most["layer_sharded"][0].messages == 2
    assert one.flops / 4 < most["distributed"][0].flops < one.flops
    flops = 0
    numerics = Numerics(MuonConfig(ns_iteration="standard"), device)
    for parameter in plan.parameters:
        for matrix in parameter.matrices:
            shape = [matrix.rows, matrix.cols]
            if parameter.partition_dim is not None:
                shape[parameter.partition_dim] //= 4
            flops += ns_flops(*shape, numerics)
    assert most["blockwise"][0].flops == flops


def test_the_papers_ranks_each_gather_and_orthogonalize_what_they_have_a_slice_of() -> (
    None
):
    plan = one_matrix(1024, 2048, dp=4)
    numerics = Numerics(CONFIG)
    ranks = price_paper(alone(plan), numerics, PLAIN, (0, 0, 1, 1))
    quarter = 1024 * 2048 * 2 // 4
    assert [(rank.inside, rank.between) for rank in ranks] == [
        ([quarter] * 2, [2 * quarter] * 2)
    ] * 4
    assert {rank.flops for rank in ranks} == {ns_flops(1024, 2048, numerics)}
    assert ranks[0].exposed(PLAIN) == pytest.approx(3 * quarter / 1e9)
    plan = one_matrix(1024, 2048, dp=2, padding=quarter)
    uneven = price_paper(alone(plan), numerics, PLAIN, (0, 1))
    assert [rank.between for rank in uneven] == [
        [3 * quarter, quarter],
        [quarter, 3 * quarter],
    ]
    assert [rank.exposed(PLAIN) for rank in uneven] == [
        pytest.approx(3 * quarter / 1e9)
    ] * 2


# ---------------------------------------------------------------- hardware


def test_every_constant_of_a_preset_has_a_unit_and_a_source() -> None:
    for preset in PRESETS.values():
        sources = dict(preset.sources)
        assert set(sources) == set(CONSTANTS) and all(sources.values())
        lines = preset.lines()
        assert len(lines) == len(CONSTANTS)
    lines = H100.lines()
    assert (
        "memory_gbytes 3350 10^9 bytes/s (NVIDIA's H100 data sheet, SXM: 3.35 TB/s)"
        in lines
    )


def test_hardware_is_read_from_json() -> None:
    read = from_json('{"name": "mine", "values": {"memory_gbytes": 4800}}', "mine.json")
    changed = H100.with_values({"memory_gbytes": 4800}, "mine.json")
    assert read == dataclasses.replace(changed, name="mine")


@pytest.mark.parametrize(
    "text, error, said",
    [
        ('{"values": {"speed": 1.0}}', ValueError, "'speed' is no constant"),
        (
            '{"values": {"memory_gbytes": 0}}',
            ValueError,
            r"memory_gbytes must be from 1e-09 to .*, got 0$",
        ),
        (
            '{"values": {"memory_gbytes": "fast"}}',
            TypeError,
            "memory_gbytes must be a number",
        ),
        (
            '{"values": {"memory_efficiency": 1.5}}',
            ValueError,
            "memory_efficiency must be from 1e-09 to 1 .share., got 1.5",
        ),
        ('{"values": {"launch_us": -1.0}}', ValueError, "launch_us must be from 0 to "),
        (
            '{"values": {"processors": 1.5}}',
            TypeError,
            "processors must be a whole number",
        ),
        ('{"values": {"launch_us": NaN}}', ValueError, "NaN is no number"),
        (
            '{"values": {"launch_us": 1' + "0" * 400 + "}}",
            ValueError,
            "000 is not finite",
        ),
        ('{"values": []}', TypeError, "'values' must be a JSON dict"),
        ('{"sources": {"launch_us": 1}}', TypeError, "must be a text, got 1"),
        ("{", ValueError, "is not JSON: Expecting"),
        ("[" * 100_000, ValueError, "it is nested too deeply"),
    ],
)
def test_a_wrong_constant_of_hardware_is_named(
    text: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        from_json(text, "mine.json")


@pytest.mark.parametrize("name", CONSTANTS)
def test_every_constant_of_hardware_has_bounds(name: str) -> None:
    """Beyond them times were nan, inf or below 0, or too large for a float."""
    is_counted = CONSTANTS[name] in ("GPUs", "processors")
    beyond: list[float] = [int(most_of(name)) * 10, 10**300]
    if is_counted:
        beyond.append(0)
    elif least_of(name):
        beyond += [5e-324, 1e-10]
    for value in beyond:
        with pytest.raises(ValueError, match=f"^{name} must be from .* to .*, got "):
            from_json(json.dumps({"values": {name: value}}), "mine.json")
    for bound in (least_of(name), most_of(name)):
        assert getattr(H100.with_values({name: bound}, "mine"), name) == bound


def test_homes_on_several_nodes_are_priced_by_the_stages_own_nodes() -> None:
    """A node of eight GPUs may have only two ranks of a stage."""
    config = dataclasses.replace(CONFIG, split_matrices=4)
    plan = one_matrix(1024, 256, 8, config)
    near, far = (
        priced(plan, H100, nodes=[rank // n for rank in range(8)]) for n in (8, 2)
    )
    assert plan.shared and near.newton_schulz_busiest < far.newton_schulz_busiest


def test_state_on_the_host_is_priced_by_its_bytes() -> None:
    """Half of bf16 momenta and 16-bit main parameters, of a matrix on two ranks."""
    optimizer = Optimizer(
        one_matrix(4, 500, 2), (0, 100), held=StateBytes(2, 2, 2, 2, on_host=0.5)
    )
    # 1 kB/s
    slow = PLAIN.with_values(
        {"host_gbytes": 1e-6, "host_memory_gbytes": 1e-6}, "the test"
    )
    ranks = on_host([optimizer], slow)
    assert ranks == [
        HostTime(1.0, 2.0, 0.0),
        HostTime(1.0, 2.0, pytest.approx(0.3 + 4.0)),
    ]
    assert [rank.step(on_device=0.5) for rank in ranks] == [2.0, pytest.approx(4.3)]
    assert ranks[0].step(on_device=1.5) == 2.5
    (alone, _) = on_host([optimizer], slow, with_muon=False)
    assert alone == HostTime(0.0, 0.0, pytest.approx(3.0 + 40.0))
    assert (
        on_host([dataclasses.replace(optimizer, held=StateBytes())], slow)
        == [HostTime()] * 2
    )
