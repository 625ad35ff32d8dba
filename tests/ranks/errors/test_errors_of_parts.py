"""Bad gradients, and models of which a part is frozen or routed otherwise: errors
everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.models.gpt import (
    SEQUENCE,
    VOCAB,
    Case,
    Topology,
    are_unchanged,
    build,
    error_of_optimizer,
    error_of_start,
    held,
    on_ranks,
    prepare_step,
    printed_by,
    start,
    stepped,
    take_steps,
)
from support.models.gpt_model import layer_spec
from support.ranks import error_of, run
from support.runs.topologies import DP2_EP2, ONE, PP2, TP2, TP2_PP2

CASE = Case(steps=1)


def _bad_gradient(
    case: Case, topology: Topology, bad: float, where: str
) -> dict[str, Any]:
    """One bad element on one rank; the error as text, and whether anything changed."""
    built = stepped(case, topology, 1)
    before = held(built)["shards"]
    prepare_step(built, 1)
    owned = where in held(built)["shards"] and built.tp_rank == 0
    if owned:
        start_of_piece, _, _ = held(built)["shards"][where]
        built.params[where].main_grad.view(-1)[start_of_piece] = bad
    text = error_of(built.optimizer.step)
    same = are_unchanged(built, before)
    return {"text": text, "same": same, "owned": owned}


@pytest.mark.parametrize("clip", [0.0, 1.0], ids=["", "clip"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "where",
    ["decoder.layers.0.mlp.linear_fc1.weight", "embedding.word_embeddings.weight"],
)
def test_a_bad_gradient_is_an_error_everywhere_and_changes_nothing(
    where: str, bad: float, clip: float
) -> None:
    results = on_ranks(_bad_gradient, replace(CASE, clip=clip), TP2_PP2, bad, where)
    _check_bad_gradient(results, where)


def test_a_bad_gradient_of_an_expert_leaves_the_dense_part_unstepped_too() -> None:
    """Its optimizer is the second of the chain; the first would have stepped by
    then.
    """
    where = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"
    case = replace(CASE, moe=True)
    results = on_ranks(_bad_gradient, case, DP2_EP2, float("nan"), where)
    _check_bad_gradient(results, where)  # with the expert's number over all EP ranks


def test_a_gradient_that_momentum_would_add_up_to_inf_is_an_error_before_it_does() -> (
    None
):
    """2e37 summed up by 1 / (1 - 0.95) is more than bf16 and fp32 have; AdamW has no
    such limit.
    """
    where = "decoder.layers.0.mlp.linear_fc1.weight"
    results = on_ranks(_bad_gradient, CASE, TP2, -2e37, where)
    _check_bad_gradient(results, where)
    assert all("beyond ±1.7e+37" in result["text"] for result in results)
    for case, name, bad in ((CASE, where, 1.6e37), (CASE, "output_layer.weight", 2e37)):
        for result in on_ranks(_bad_gradient, case, TP2, bad, name):
            assert result["text"] == "no error"
    for result in on_ranks(_bad_gradient, replace(CASE, clip=1.0), TP2, 1.6e37, where):
        assert (
            result["same"] and "their norm is Inf, so clip_grad would" in result["text"]
        )


def _check_bad_gradient(results: list[dict[str, Any]], where: str) -> None:
    assert sum(result["owned"] for result in results) == 1
    for result in results:
        assert result["same"]
        wanted = "FloatingPointError: " if result["owned"] else "RuntimeError: rank "
        assert result["text"].startswith(wanted), result["text"]
        short = where.split(".", 3)[-1] if where.startswith("decoder") else where
        assert "NaN or Inf" in result["text"] and short in result["text"]


def _errors_of_patterns(**settings: tuple[Any, ...]) -> list[str]:
    return on_ranks(error_of_start, CASE.with_muon(**settings), PP2)


def test_a_pattern_that_matches_nothing_on_any_stage_is_an_error_everywhere() -> None:
    for text in _errors_of_patterns(muon_exclude=("*.linear_fc3.*",)):
        assert text.startswith(
            "ValueError: '*.linear_fc3.*' in muon_exclude (--muon-exclude) "
        )
    for text in _errors_of_patterns(wd_mults=(("nothing*", 0.5),)):
        assert (
            "'nothing*' in wd_mults (--muon-wd-mult) matches no parameter of the model"
            in text
        )
    # of one stage only: no error
    assert _errors_of_patterns(muon_include=("output_layer.weight",)) == 2 * [
        "no error"
    ]


DENSE = tuple(
    """
    embedding.* output_layer.* *layernorm* *attention* *router* *shared_e*
""".split()
)


def _only_experts_train(case: Case) -> tuple[str, list[float]]:
    """The error of building, or what it prints; and the loss scales of a run that
    overflows.
    """
    try:
        built, printed = printed_by(lambda: start(case, DP2_EP2))
    except ValueError as error:
        return f"ValueError: {error}", []
    assert [each.is_stub_optimizer for each in built.optimizer.chained_optimizers] == [
        True,
        False,
    ]
    take_steps(built, range(case.steps))
    return printed, built.log.get("loss_scales", [])


def test_where_only_experts_train_the_loss_scale_is_still_one() -> None:
    """Megatron takes it from the dense optimizer, then a stub that sees no overflow."""
    overflow = ((1, "*.local_experts.3.linear_fc1.weight"),)
    case = replace(
        CASE, bf16=False, fp16=True, moe=True, frozen=DENSE, overflow=overflow, steps=3
    )
    for _, scales in run(_only_experts_train, 2, case):
        assert scales[1:] == [scales[0], scales[0] / 2]


def test_where_only_experts_train_patterns_are_checked_and_the_share_is_said() -> None:
    case = replace(CASE, moe=True, frozen=DENSE, steps=1)
    (first, _), (second, _) = run(_only_experts_train, 2, case)
    assert "of the model's" in first and "Muon has" not in second
    wrong = case.with_muon(muon_exclude=("nothing*",))
    for text, _ in run(_only_experts_train, 2, wrong):
        assert text.startswith(
            "ValueError: 'nothing*' in muon_exclude (--muon-exclude) matches no"
        )


def _frozen_too_late() -> str:
    built = build(CASE, PP2)
    if built.pp_rank == 0:
        built.params["decoder.layers.0.mlp.linear_fc1.weight"].requires_grad_(False)
    return error_of_optimizer(built)


def test_freezing_after_the_buffers_are_made_is_an_error() -> None:
    one, other = run(_frozen_too_late, 2)
    assert one.startswith(
        "ValueError: decoder.layers.0.mlp.linear_fc1.weight was frozen after"
    )
    assert other.startswith(
        "RuntimeError: rank 0 stopped this run: decoder.layers.0.mlp.linear_f"
    )


def _of_a_mimo_model() -> str:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.mimo import MimoModel, MimoModelConfig
    from megatron.core.transformer.spec_utils import ModuleSpec

    built = build(CASE, ONE)
    config = built.ddp.config
    config.log_max_attention_logit = True  # whether logits are watched is asked first
    sizes = {"vocab_size": VOCAB, "max_sequence_length": SEQUENCE}
    layer = {
        "config": config,
        "transformer_layer_spec": layer_spec(CASE, config, {}),
        **sizes,
    }
    built.chunks = [MimoModel(MimoModelConfig(ModuleSpec(GPTModel, params=layer)))]
    return error_of_optimizer(built)


def test_a_model_that_is_no_ddp_chunk_is_named() -> None:
    (text,) = run(_of_a_mimo_model, 1)
    assert text.startswith(
        "NotImplementedError: optimizer='muon' does not support MimoModel yet"
    )
