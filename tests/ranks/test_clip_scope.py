"""``clip_scope="adamw"``: the clip neither counts nor scales Muon's gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from support.models.gpt import error_of_building, prepare_step, start, train
from support.ranks import error_of, run
from support.runs.cases import Case, Topology, muon_weights, whole_grad
from support.runs.whole import whole

FREE = Case(steps=2)
CLIPPED = replace(FREE, clip=0.01, muon=(("clip_scope", "adamw"),))


@pytest.mark.parametrize(
    "topology", [Topology(tp=2, dp=2, overlap=True), Topology(pp=2, dp=2)], ids=str
)
def test_muons_gradients_are_not_clipped_and_adamws_are(topology: Topology) -> None:
    clipped, free = (run(train, 4, case, topology) for case in (CLIPPED, FREE))
    kept, plain = whole(clipped), whole(free)
    muons = muon_weights(FREE)
    for kind in ("main", "exp_avg"):
        for name in muons:
            assert torch.equal(kept[kind][name], plain[kind][name]), (name, kind)
    shapes = {name: tuple(weight.shape) for name, weight in plain["params"].items()}
    adamws = shapes.keys() - muons
    grads = [
        {name: whole_grad(FREE, name, shapes[name], step) for name in adamws}
        for step in range(FREE.steps)
    ]
    norms = [math.hypot(*(float(g.double().norm()) for g in each.values())) for each in grads]
    assert clipped[0]["log"]["norms"] == pytest.approx(norms, rel=1e-6)
    for name in adamws:  # Adam's first moment of gradients that were scaled to the clip
        moment = torch.zeros(shapes[name])
        for norm, each in zip(norms, grads, strict=True):
            moment = 0.9 * moment + 0.1 * each[name] * CLIPPED.clip / norm
        # Megatron's 1e-6 in the clip's quotient; two steps may cancel
        rounding = float(moment.abs().max()) * 1e-6
        torch.testing.assert_close(kept["exp_avg"][name], moment, rtol=1e-4, atol=rounding)


def _bad_gradient() -> str:
    built = start(CLIPPED, Topology(dp=2))
    prepare_step(built, 0)
    built.params["decoder.layers.1.mlp.linear_fc1.weight"].main_grad.view(-1)[0] = math.nan
    return error_of(built.optimizer.step)


def test_a_gradient_of_muons_must_still_be_finite() -> None:
    texts = run(_bad_gradient, 2)
    assert all("layers.1.mlp.linear_fc1" in text for text in texts)
    assert sum(text.startswith("FloatingPointError") for text in texts) == 1


def test_without_a_clip_it_is_refused() -> None:
    (text,) = run(error_of_building, 1, FREE, Topology(), {"clip_scope": "adamw"})
    assert text.startswith("ValueError: clip_scope (--muon-clip-scope) 'adamw' with clip_grad 0.0")
