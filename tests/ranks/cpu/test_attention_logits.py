"""The largest attention logits, as Megatron's own attention computes them in forward
passes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.installed import VERSION, installed, lacks
from support.models.clipped import attentions
from support.models.gpt import Built, build, make_optimizer, on_ranks
from support.ranks import run
from support.runs.cases import SEQUENCE, VOCAB, Case, Topology
from support.runs.topologies import ONE, TP2_DP2

FAR = 1e9  # a threshold that no logit passes
WATCHED = Case(bf16=False).with_muon(qk_clip=FAR)
BATCHES, SEQUENCES = 2, 4


def _tokens(batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(0, VOCAB, (SEQUENCES, SEQUENCE + 1), generator=generator)


def _forward(built: Built, batch: int) -> Tensor:
    """The losses of this rank's part of a batch: of its sequences, and of their
    tokens.
    """
    from megatron.core import parallel_state as ps

    from megatron_muon.cpu.attention import positions

    topology = built.topology
    tokens = _tokens(batch).chunk(topology.dp)[ps.get_data_parallel_rank()]
    here = positions(SEQUENCE, topology.cp, ps.get_context_parallel_rank())
    given, labels = tokens[:, :-1][:, here], tokens[:, 1:][:, here]
    losses: Tensor = built.ddp(given, here.expand(len(tokens), -1), None, labels=labels)
    return losses


def _watched(case: Case, topology: Topology, **settings: Any) -> Built:
    with installed(case.settings):
        built = build(case, topology)
        for attention in attentions(built):
            for name, value in settings.items():
                setattr(attention.config, name, value)
        for param in built.params.values():
            param.data.mul_(3.0)  # so that logits differ
        built.optimizer = make_optimizer(built)
    return built


def _maxima(built: Built) -> list[Any]:
    return [each.core_attention.current_max_attn_logits for each in attentions(built)]


def _expected_and_kept(case: Case) -> list[tuple[list[float], list[float]]]:
    """Of each attention, over two micro-batches; expected are products of what it was
    given.
    """
    built = _watched(case, ONE)
    seen: list[list[Tensor]] = []
    for attention in attentions(built):
        largest: list[Tensor] = []
        seen.append(largest)
        attention.core_attention.register_forward_pre_hook(
            lambda core, given, largest=largest: largest.append(
                _by_hand(core, *given[:2])
            )
        )
    for batch in range(BATCHES):
        _forward(built, batch)
    kept = [each.tolist() for each in _maxima(built)]
    expected = [torch.stack(largest).amax(0).tolist() for largest in seen]
    built.ddp.eval()
    _forward(built, BATCHES)
    assert [each.tolist() for each in _maxima(built)] == kept, "evaluation counts"
    built.optimizer.qk_clip.apply()
    assert _maxima(built) == [None] * len(kept)
    return list(zip(expected, kept, strict=True))


def _by_hand(core: Any, query: Tensor, key: Tensor) -> Tensor:
    """(heads,): the largest causal logit, in fp64."""
    length, _, heads, _ = query.shape
    key = key.repeat_interleave(heads // key.shape[2], dim=2)
    logits = torch.einsum("qbhd,kbhd->hbqk", query.double(), key.double())
    logits *= core.softmax_scale * (core.scale_mask_softmax.scale or 1)
    later = torch.arange(length) > torch.arange(length)[:, None]
    return logits.masked_fill(later, -math.inf).amax(dim=(1, 2, 3)).detach()


@pytest.mark.parametrize(
    "changes",
    [{}, {"bf16": True}, {"mla": "column"}, {"heads": 4, "groups": 4}],
    ids=lambda changes: "-".join(changes),
)
def test_each_heads_largest_logit_of_a_step_is_kept(changes: dict[str, Any]) -> None:
    case = replace(WATCHED, **changes)
    tolerance = 2e-2 if case.bf16 else 1e-5
    (layers,) = run(_expected_and_kept, 1, case)
    assert len(layers) == 2
    for expected, kept in layers:
        assert len(set(expected)) == case.heads
        assert kept == pytest.approx(expected, rel=tolerance)


def _largest_of_stage(case: Case, topology: Topology) -> tuple[list[float], float]:
    built = _watched(case, topology)
    for batch in range(BATCHES):
        _forward(built, batch)
    clip = built.optimizer.qk_clip
    numbers = clip.reduced().tolist()
    logits: list[float] = []
    for _, place in clip.places():
        logits += numbers[place][1:]
    clip.apply()
    return logits, clip.largest


@pytest.mark.parametrize("topology", [TP2_DP2, Topology(cp=2)])
def test_every_rank_knows_the_largest_logits_of_the_whole_batch(
    topology: Topology,
) -> None:
    ((alone, largest),) = on_ranks(_largest_of_stage, WATCHED, ONE)
    assert largest == max(alone)
    for reduced, most in on_ranks(_largest_of_stage, WATCHED, topology):
        assert reduced == pytest.approx(alone, rel=1e-5)
        assert most == pytest.approx(largest, rel=1e-5)


by_either_flag = pytest.mark.parametrize(
    "flag",
    [
        "--muon-qk-clip",
        pytest.param(
            "--qk-clip",
            marks=pytest.mark.skipif(VERSION < (0, 16), reason="Megatron has none"),
        ),
    ],
)


def _clips(flag: str, threshold: float) -> dict[str, Any]:
    if flag == "--qk-clip":
        return {"muon": (), "qk_clip": (threshold, 0.5)}
    return {"muon": (("qk_clip", threshold),)}


def _clip(built: Built) -> None:
    if not built.case.qk_clip:
        built.optimizer.qk_clip.apply()
        return
    with installed():
        from megatron.core.optimizer import qk_clip

        qk_clip.clip_qk(built.chunks)


def _clipped_forward(
    case: Case, values: dict[str, float]
) -> tuple[list[float], list[float]]:
    """The largest logit of each attention before and after a clip, without a step
    between.
    """
    built = _watched(case, ONE)
    for name, param in built.params.items():
        for end, value in values.items():
            if name.endswith(end):
                param.data.fill_(value)
    logits = []
    for _ in range(2):
        _forward(built, 0)
        logits.append([max(each.tolist()) for each in _maxima(built)])
        _clip(built)
    return logits[0], logits[1]


@by_either_flag
@pytest.mark.parametrize(
    "changes, values",
    [
        ({}, {}),
        ({}, {"linear_qkv.weight": 0.0, "linear_qkv.bias": 3.0}),
        ({"output_gate": True}, {}),
        ({"sinks": True}, {"softmax_offset": 50.0}),
        ({"mla": "column"}, {}),
        ({"mla": "column", "latent_biases": True}, {"up_proj.bias": 3.0}),
    ],
    ids="qkv biases-alone gate sinks mla mla-biases".split(),
)
def test_after_a_clip_the_same_batch_has_the_threshold_as_its_largest_logit(
    changes: dict[str, Any], values: dict[str, float], flag: str
) -> None:
    """Of the first layer; the others get other activations. Whatever else a logit is
    made of is scaled, too, or is no part of it.
    """
    case = replace(WATCHED, optimizer="adam", **changes, **_clips(flag, 0.05))
    lacking = lacks(case, ONE)
    if lacking:
        pytest.skip(lacking)
    ((before, after),) = run(_clipped_forward, 1, case, values)
    assert before[0] > 2 * 0.05
    assert after[0] == pytest.approx(0.05, rel=1e-4)


def _trained_with_biases(case: Case) -> tuple[list[float], list[float]]:
    """Of each step the largest logit of the first layer, and the norm of its weight."""
    built = _watched(case, ONE)
    attention = next(attentions(built))
    attention.linear_qkv.bias.data.fill_(3.0)
    logits: list[float] = []
    norms: list[float] = []
    for step in range(case.steps):
        built.ddp.zero_grad_buffer()
        _forward(built, step).mean().backward()
        built.ddp.finish_grad_sync()
        logits.append(_maxima(built)[0].max().item())
        built.optimizer.step()
        if case.qk_clip:
            _clip(built)
        norms.append(attention.linear_qkv.weight.norm().item())
    return logits, norms


@by_either_flag
@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_weights_do_not_shrink_where_biases_make_the_logit(
    optimizer: str, flag: str
) -> None:
    """Biases that stay keep the logit above the threshold, so each step would scale the
    weights again.
    """
    limit = 10.0
    changes = _clips(flag, limit)
    case = replace(WATCHED, optimizer=optimizer, lr=1e-3, steps=8, **changes)
    ((logits, norms),) = run(_trained_with_biases, 1, case)
    assert logits[0] > 3 * limit
    # each step has another batch, and a step's growth
    assert max(logits[1:]) < 1.5 * limit
    assert norms[-1] > 0.95 * norms[0]


@pytest.mark.skipif(
    VERSION < (0, 16), reason="this core has no log_max_attention_logit"
)
def test_logits_are_logged_alone_by_megatrons_flag() -> None:
    (value,) = run(_logged, 1)
    (other,) = on_ranks(_largest_of_stage, WATCHED, ONE)
    assert value == (other[1], True)


def _logged() -> tuple[float, bool]:
    with installed():
        built = build(Case(bf16=False), ONE)
        built.chunks[0].config.log_max_attention_logit = True
        for param in built.params.values():
            param.data.mul_(3.0)
        built.optimizer = make_optimizer(built)
        for batch in range(BATCHES):
            _forward(built, batch)
        before = {name: param.clone() for name, param in built.params.items()}
        from megatron.core.optimizer import qk_clip

        largest = qk_clip.clip_qk(built.chunks, log_max_only=True)
        same = all(
            torch.equal(param, before[name]) for name, param in built.params.items()
        )
        return largest, same


@pytest.mark.skipif(VERSION < (0, 16), reason="this core has no clip_qk")
def test_the_log_has_the_logits_that_a_step_has_clipped() -> None:
    ((largest, logged),) = run(_logged_after_a_step, 1)
    assert largest == logged > 0.05


def _logged_after_a_step() -> tuple[float, float]:
    built = _watched(WATCHED.with_muon(qk_clip=0.05), ONE)
    _forward(built, 0)
    largest = max(max(each.tolist()) for each in _maxima(built))
    built.optimizer.qk_clip.apply()
    with installed():
        from megatron.core.optimizer import qk_clip

        return largest, qk_clip.clip_qk(built.chunks, log_max_only=True)
