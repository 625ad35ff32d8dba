"""The layers' outputs and largest logits, in real forward passes by Megatron's own
schedules.

Transformer Engine, whose attention keeps logits in Megatron, needs a GPU. A hook keeps
them here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import pipeline_parallel

from support.installed import VERSION
from support.models.gpt import each_chunk, on_ranks
from support.ranks import run
from support.runs.cases import GROUPS, Case, Topology
from support.runs.topologies import ONE, PP2, TP2_DP2_SP
from support.runs.training import MODEL, train
from support.runs.watching import by_row, having, watched

pytestmark = pytest.mark.skipif(
    VERSION < (0, 13),
    reason="the model is built with vp_stage; test_pretrain_watch.py has core 0.12",
)
DENSE = replace(MODEL, steps=2, optimizer="muon")
# of the last stage; TP cuts the logits
LAST = ["decoder.final_layernorm", "output_layer"]
RUNS = [(DENSE, TP2_DP2_SP), (replace(DENSE, recompute=True), PP2)]


def _train(model: Case, topology: Topology, interval: int = 1) -> dict[str, Any]:
    """What ``train`` returns, in a run that logs; each forward pass's outputs, and the
    largest logits of this rank's heads.
    """
    outputs: dict[str, list[float]] = {}
    attentions: list[Any] = []

    def watch(chunk: Any) -> None:
        for name, module in chunk.named_modules():
            if hasattr(module, "core_attention"):
                module.config.log_max_attention_logit = True
                _keep_logits(module.core_attention)
                attentions.append(module.core_attention)
            row = name.removeprefix("module.").removeprefix("module.")
            if name.rpartition(".")[2].isdigit() and name.split(".")[-2] == "layers":
                row = f"decoder.layers.{module.layer_number - 1}"
            elif row not in LAST:
                continue
            module.register_forward_hook(_keep(outputs.setdefault(row, [])))

    with each_chunk(watch):
        trained = train(watched(model, interval), topology)
    heads = [attention.current_max_attn_logits.tolist() for attention in attentions]
    return {**trained, "outputs": outputs, "heads": heads}


def _keep(seen: list[float]) -> Any:
    def hook(module: Any, given: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        seen.append(float(hidden.detach().double().square().mean()))

    return hook


def _keep_logits(core: Any) -> None:
    """Keep the largest logit of each head, under Megatron's name and until it is
    None.
    """
    core.current_max_attn_logits = None

    def before_softmax(module: Any, given: tuple[Any, ...]) -> None:
        largest = given[0].detach().float().amax(dim=(0, 2, 3))
        before = core.current_max_attn_logits
        core.current_max_attn_logits = (
            largest if before is None else before.maximum(largest)
        )

    core.scale_mask_softmax.register_forward_pre_hook(before_softmax)


def _logits(held: dict[str, Any]) -> dict[str, float]:
    """Of the last step."""
    return _of_rows(held["numbers"][-1], "max_logit")


def _logged(held: dict[str, Any]) -> list[dict[str, float]]:
    """Of the logging steps."""
    return [_of_rows(step, "output_rms") for step in held["numbers"] if step]


def _of_rows(numbers: dict[str, float], name: str) -> dict[str, float]:
    found = having(by_row(numbers), name)
    return {row: numbers[name] for row, numbers in found.items()}


@pytest.fixture(scope="module")
def alone() -> tuple[list[dict[str, float]], dict[str, float]]:
    (held,) = on_ranks(_train, DENSE, ONE)
    logged = _logged(held)
    rows = [*(f"decoder.layers.{layer}" for layer in range(DENSE.layers)), *LAST]
    assert [set(each) for each in logged] == [set(rows)] * DENSE.steps
    for row, squares in held["outputs"].items():
        passes = torch.tensor(squares).view(DENSE.steps, -1).mean(1).sqrt().tolist()
        assert [rows[row] for rows in logged] == pytest.approx(passes, rel=1e-5)
    logits = _logits(held)
    names = [f"decoder.layers.{layer}.self_attention" for layer in range(DENSE.layers)]
    assert list(logits) == [
        f"{name}[group {group}]" for name in names for group in range(GROUPS)
    ]
    largest = torch.tensor(held["heads"]).view(len(logits), -1).amax(1)
    assert list(logits.values()) == pytest.approx(largest.tolist(), rel=1e-5)
    return logged, logits


@pytest.mark.parametrize("model, topology", RUNS)
def test_outputs_and_logits_are_those_of_one_process(
    model: Case, topology: Topology, alone: Any
) -> None:
    held, *_ = on_ranks(_train, model, topology)
    outputs, logits = alone
    assert _logits(held) == pytest.approx(logits, rel=1e-3)
    for here, there in zip(_logged(held), outputs, strict=True):
        assert here == pytest.approx(there, rel=1e-3)


def _train_with_overflow(at: int, numbered: bool) -> dict[str, Any]:
    """``_train`` of 6 steps, of which number ``at`` is skipped: a gradient is not
    finite. Numbered steps have the numbers of a loop, which counts the skipped one,
    too. ``written`` has the numbers of the steps that were written.
    """
    from megatron_muon.mcore.host.loop import NO_HOST, Host, set_host

    begun: list[str] = []
    written: list[int] = []

    class Loop(Host):
        def step(self) -> int | None:
            return len(begun) if numbered else None

        def write(self, step: int, scalars: Any) -> None:
            written.append(step)

    real = pipeline_parallel.get_forward_backward_func

    def forward_backward(**given: Any) -> Any:
        begun.append("a step")
        result = real()(**given)
        if len(begun) == at:
            next(given["model"].parameters()).main_grad.fill_(torch.inf)
        return result

    pipeline_parallel.get_forward_backward_func = lambda: forward_backward
    set_host(Loop())
    try:
        model = replace(DENSE, fp16=True, steps=6)
        return {**_train(model, ONE, 2), "written": written}
    finally:
        pipeline_parallel.get_forward_backward_func = real
        set_host(NO_HOST)


# The step that is skipped, whether steps have a loop's numbers, and the steps that log:
# their numbers, and when they were.
SKIPPED = [(5, True, [2, 4, 6], [2, 4, 6]), (4, False, [2, 4], [2, 5])]


@pytest.mark.parametrize("at, numbered, numbers, times", SKIPPED)
def test_a_skipped_steps_outputs_are_forgotten(
    at: int, numbered: bool, numbers: list[int], times: list[int]
) -> None:
    (held,) = run(_train_with_overflow, 1, at, numbered)
    assert [step for step, ok in enumerate(held["ok"], 1) if not ok] == [at]
    assert [step for step, log in enumerate(held["numbers"], 1) if log] == times
    assert held["written"] == numbers
    squares = (
        torch.tensor(held["outputs"]["decoder.layers.0"]).view(6, -1).mean(1).sqrt()
    )
    logged = [rows["decoder.layers.0"] for rows in _logged(held)]
    assert logged == pytest.approx(
        [float(squares[step - 1]) for step in times], rel=1e-3
    )
