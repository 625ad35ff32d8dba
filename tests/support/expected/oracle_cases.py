"""Cases of the plugin and of the float64 oracle, and how far rounding may move them
apart.

Where the tolerance comes from. Rounding to nearest moves a value by at most the unit
roundoff u of its dtype, relative: 2⁻²⁴ in fp32, 2⁻⁸ in bf16 (8 significant bits). So
the oracle is run again in float64 with every single rounding that an implementation
makes replaced by a move of exactly ±u in a random direction: u of ``ns_dtype`` inside
Newton-Schulz, of fp32 everywhere else. What comes out is as far from the exact oracle
as an implementation gets whose every rounding is the worst one, and the amplification
of the iteration (up to 3.4445⁵ = 485 for small singular values) is in it without being
estimated. Round-to-nearest errors have an rms of 0.29 ulp, which is 0.29 to 0.58 u: so
the plugin has a margin of about 2, and no factor is put on top. Two more errors of fp32
are modelled:

- a product of k terms is accumulated in fp32. Every partial sum is at most
  ‖row‖‖column‖ (Cauchy- Schwarz) and of random sign, rms ‖row‖‖column‖/sqrt(2 k), so
  the k roundings add up to at most u ‖row‖‖column‖/sqrt 2 rms; the model moves by ±u
  ‖row‖‖column‖.
- a norm is the root of a sum of n squares. Torch adds them in eight lanes at least, also
  with ATEN_CPU_CAPABILITY=default. A lane's partial sums grow to an eighth of the sum,
  each rounded by u, of random sign: in all u sqrt(n / 3) / 8 of the sum, half of it in
  the root. It is one number, which moves a whole matrix: no mean over elements makes it
  sure. So the model moves it by twice that, and by 2.5 u for the sum of the lanes and
  for the root; and always in the way in which the errors of a step add up, since a few
  single numbers of random sign can cancel in all three runs.
- Megatron sums the squares of the global norm in fp32. The norm is compared by itself;
  the oracle then clips by Megatron's.

Parameter by parameter, the Frobenius norm of the deviation may reach the largest of
three such runs. Its largest element may reach twice theirs, because the largest of a
sample is itself random: of n = 96 to 50 000 Gaussians it lies between 2 and 4.7 σ, and
the plugin's σ is at most 0.58 of the runs'.

Where a rounding decides the sign of a direction, cautious decay may take a weight's
decay or not: either is allowed. Gradients do not depend on the weights here, so no other
weight is moved by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from support.expected.oracle import Oracle
from support.expected.separate import of_two_tp_ranks
from support.expected.shaking import TRIALS, all_shaken, sizes
from support.models.gpt import (
    Case,
    Topology,
    lr_at,
    matches,
    on_ranks,
    train,
    truth,
    whole_grad,
    whole_weight,
)
from support.runs.topologies import (
    ONE,
    PP2_DP2,
    TP2_DP2,
    TP2_DP2_EP2,
    TP2_DP2_EP2_ETP1,
    TP2_PP2_DP2,
    TP4,
)
from support.runs.whole import Whole, whole

STEPS = 5
FEW = 4  # where what differs is which matrices there are; the clip is active in some
BASE = Case(steps=STEPS, clip=200.0)
TOPOLOGIES = [ONE, TP2_DP2, TP2_PP2_DP2]
Result = dict[str, dict[str, Tensor]]
Norms = Sequence[float] | None


FP32 = replace(BASE, bf16=False).with_muon(ns_dtype="fp32")
BF16 = BASE.with_muon(ns_dtype="bf16")
CASES = {
    "fp32": FP32,
    "bf16": BF16,
    "groups": replace(
        FP32, faster=("*.linear_fc2.weight", "embedding.*", "*.linear_qkv.*")
    ),
    "one-qkv": FP32.with_muon(split_qkv=False),
    "shared": FP32.with_muon(split_matrices=2),
    "shared-bf16": replace(BF16.with_muon(split_matrices=4), steps=FEW),
    "no-nesterov": FP32.with_muon(nesterov=False),
    "other-constants": FP32.with_muon(momentum=0.8, matched_adamw_rms=0.3, ns_steps=4),
    "unit-rms-norm": FP32.with_muon(scale_mode="unit_rms_norm", matched_adamw_rms=4.0),
    "shape-scaling": FP32.with_muon(scale_mode="shape_scaling", matched_adamw_rms=4.0),
    "update-norm": FP32.with_muon(scale_mode="update_norm", ns_steps=3),
    "update-norm-shared": FP32.with_muon(scale_mode="update_norm", split_matrices=2),
    "full-period": replace(
        FP32.with_muon(full_period=2, block_lr_mult=0.5), gated=True
    ),
    "cautious-decay": replace(FP32.with_muon(cautious_decay=True), weight_decay=2.0),
    "independent-decay": replace(
        FP32.with_muon(independent_decay=True), faster=("*.linear_fc2.weight",)
    ),
    "momentum-warm-up": FP32.with_muon(momentum_warmup=3, momentum_start=0.3),
    "hyperball": replace(FP32.with_muon(rule="hyperball"), weight_decay=0.0),
    "hyperball-bf16": replace(BF16.with_muon(rule="hyperball"), weight_decay=0.0),
    "hyperball-experts": replace(
        FP32.with_muon(rule="hyperball", split_matrices=2),
        moe=True,
        weight_decay=0.0,
        steps=FEW,
    ),
    "namo": FP32.with_muon(rule="namo"),
    "namo-bf16": BF16.with_muon(rule="namo"),
    "namo-experts": replace(
        FP32.with_muon(rule="namo", split_matrices=2), moe=True, steps=FEW
    ),
    "normuon": FP32.with_muon(rule="normuon"),
    "normuon-bf16": BF16.with_muon(rule="normuon"),
    "normuon-experts": replace(
        FP32.with_muon(rule="normuon", split_matrices=2), moe=True, steps=FEW
    ),
    "decay-all": FP32.with_muon(weight_decay_all_params=True),
    "tied": replace(FP32, tied=True),
    "gated": replace(FP32, gated=True),
    "heads-and-gate-up": replace(
        FP32.with_muon(
            splits=(("*.linear_qkv.*", "heads"), ("*.linear_fc1.*", "gate-up"))
        ),
        gated=True,
        steps=FEW,
    ),
    "moe": replace(FP32, moe=True, steps=FEW),
    "moe-bf16": replace(BF16, moe=True, steps=FEW),
    "te-experts": replace(FP32, moe=True, grouped="te", gated=True, steps=FEW),
    "legacy-experts": replace(FP32, moe=True, grouped="legacy", gated=True, steps=FEW),
    "mla": replace(FP32, mla="duplicated", steps=FEW),
    "cut-group": replace(FP32, groups=1, steps=FEW),
    "cut-gated-group": replace(FP32, heads=4, groups=1, output_gate=True, steps=FEW),
    "mtp": replace(FP32, mtp=True, tied=True, steps=FEW),
    "bf16-gradients": replace(BF16, fp32_grads=False, steps=FEW),
    "fp16": replace(BF16, bf16=False, fp16=True, steps=FEW),
}
EXPERTS = TP2_DP2_EP2_ETP1
WHERE = {
    "moe": EXPERTS,
    "hyperball-experts": EXPERTS,
    "normuon-experts": EXPERTS,
    "namo-experts": EXPERTS,
    "moe-bf16": Topology.of("tp2 pp2 dp2 sp ep2"),
    "te-experts": EXPERTS,
    "legacy-experts": TP2_DP2_EP2,
    "mla": TP2_DP2,
    "cut-group": TP2_DP2,
    "cut-gated-group": TP4,
    "mtp": PP2_DP2,
    "full-period": TP2_DP2,
}


# Fields of the oracle by the settings of Muon that they are.
FIELDS = {
    "matched_adamw_rms": "rms",
    "momentum": "mu",
    "nesterov": "nesterov",
    "ns_steps": "ns_steps",
    "split_qkv": "split_qkv",
    "cautious_decay": "cautious",
    "rule": "rule",
    "moment2_eps": "eps2",
}
# What is under the root; by name, outputs, inputs.
SCALE_SIZES: dict[str, Callable[[str, int, int], float]] = {
    "spectral": lambda name, rows, cols: max(rows, cols),
    "unit_rms_norm": lambda name, rows, cols: rows / cols,
    "shape_scaling": lambda name, rows, cols: rows / cols if rows > cols else 1.0,
    "update_norm": lambda name, rows, cols: max(rows, cols),
}


# --- the oracle on a case -------------------------------------------------------------


@cache
def shapes(case: Case) -> dict[str, tuple[int, ...]]:
    params = truth(replace(case, steps=0, optimizer="adam", muon=()))["params"]
    return {name: tuple(tensor.shape) for name, tensor in params.items()}


def oracle_for(case: Case, **changes: Any) -> Oracle:
    """The oracle at the start of a case; its settings come from the case alone."""
    settings: dict[str, Any] = dict(case.muon)
    decay_all = settings.get("weight_decay_all_params", False)

    def weight_decay(name: str, w: Tensor) -> float:
        if w.ndim == 1 and not decay_all:
            return 0.0
        return case.weight_decay * (0.5 if matches(name, case.faster) else 1.0)

    oracle = Oracle(
        weights={n: whole_weight(case, n, s).double() for n, s in shapes(case).items()},
        heads=case.heads,
        groups=case.groups,
        head_size=case.head_size,
        gated_attention=case.output_gate,
        lr=lambda name: lr_at(case, len(oracle.norms) - 1, name),
        weight_decay=weight_decay,
        scale_size=SCALE_SIZES[settings.get("scale_mode", "spectral")],
        betas=(0.9, 0.95),
        clip=case.clip,
        update_norm=settings.get("scale_mode") == "update_norm",
        **{FIELDS[name]: value for name, value in settings.items() if name in FIELDS},
    )
    if "independent_decay" in settings:
        oracle.decay_factor = lambda name: (
            1 / (case.lr * (3 if matches(name, case.faster) else 1))
        )
    if "momentum_warmup" in settings:
        oracle.warm_up = settings["momentum_start"], settings["momentum_warmup"]
    if "splits" in settings:
        oracle.blocks = partial(heads_and_gate_up, case)
    if "full_period" in settings:
        _take_turns(case, oracle, settings["full_period"], settings["block_lr_mult"])
    if case.optimizer == "adam":
        oracle.is_muon = lambda name, w: False
    for name, value in changes.items():
        setattr(oracle, name, value)
    return oracle


def _take_turns(case: Case, oracle: Oracle, period: int, factor: float) -> None:
    """Between full steps, each of two TP ranks has matrices of its own, and another
    rate.
    """
    whole, size = replace(oracle), oracle.scale_size

    def is_full() -> bool:
        return (len(oracle.norms) - 1) % period == 0

    def blocks(name: str, w: Tensor) -> list[Any]:
        matrices = list(whole.matrices(name, w))
        if is_full():
            return matrices
        return [
            p
            for rows in matrices
            for p in of_two_tp_ranks(case, name, rows, tuple(w.shape))
        ]

    oracle.blocks = blocks
    oracle.scale_size = lambda *of: size(*of) * (1 if is_full() else factor**2)


def heads_and_gate_up(case: Case, name: str, w: Tensor) -> list[list[int]]:
    """Each head of q, k and v as a matrix, and gate and up; the order does not
    matter.
    """
    rows = list(range(w.shape[0]))
    size = w.shape[0]
    if name.endswith("linear_qkv.weight"):
        size = case.head_size  # per query group its heads' q, then k and v
    elif name.endswith("linear_fc1.weight"):
        size = w.shape[0] // 2
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def computed(case: Case, oracle: Oracle, norms: Norms = None) -> Result:
    """Take the case's steps with an oracle, clipping by the given norms or by its
    own.
    """
    for step in range(case.steps):
        grads = {n: whole_grad(case, n, s, step) for n, s in shapes(case).items()}
        if not case.fp32_grads:
            grads = {n: g.to(case.dtype).float() for n, g in grads.items()}
        oracle.step(grads, norms[step] if norms else None)
    return {"main": oracle.weights, "exp_avg": oracle.momentum}


def shaken_oracle(case: Case, seed: int) -> Oracle:
    return oracle_for(case, **all_shaken(dict(case.muon).get("ns_dtype", "bf16"), seed))


@dataclass(frozen=True)
class Allowed:
    """How far rounding may move a run from the oracle.

    Attributes:
        limits: of each tensor beyond ``either``: (Frobenius norm, largest element).
        either: of each weight, the decays whose sign a rounding decides; 0 for most.
    """

    limits: dict[str, tuple[float, float]]
    either: dict[str, Tensor]

    def beyond(self, key: str, deviation: Tensor) -> tuple[float, float]:
        """The sizes of what no decay explains."""
        if key in self.either:
            deviation = (deviation.abs() - self.either[key]).clamp_min(0.0)
        return sizes(deviation)


@cache
def allowed(case: Case) -> Allowed:
    """What three runs with other roundings say of a case."""
    oracle = oracle_for(case)
    exact = computed(case, oracle)
    shaken = [shaken_oracle(case, seed) for seed in range(TRIALS)]
    trials = [computed(case, one) for one in shaken]
    found = Allowed({}, _undecided(oracle, shaken))
    for kind, tensors in exact.items():
        for name, want in tensors.items():
            key = f"{kind} {name}"
            norms, largest = zip(
                *(found.beyond(key, trial[kind][name] - want) for trial in trials),
                strict=True,
            )
            found.limits[key] = (max(norms), 2 * max(largest))
    return found


def _undecided(oracle: Oracle, trials: Sequence[Oracle]) -> dict[str, Tensor]:
    """The decays of elements whose direction is nearer to zero than rounding moves it:
    twice the largest move of the trials.
    """
    either: dict[str, Tensor] = {}
    for index, decay in enumerate(oracle.decays):
        others = [trial.decays[index].direction for trial in trials]
        moved = max(sizes(other - decay.direction)[1] for other in others)
        near = decay.direction.abs() <= 2 * moved
        weight = torch.zeros_like(oracle.weights[decay.name])
        sums = either.setdefault(f"main {decay.name}", weight)
        sums[decay.rows] += near * decay.size
    return either


def outside(case: Case, result: Whole, target: Result) -> dict[str, str]:
    """What is further from the target than rounding explains."""
    wrong, may = {}, allowed(case)
    for key, limits in may.limits.items():
        kind, name = key.split()
        got = may.beyond(key, result[kind][name].double() - target[kind][name])
        if not all(g <= limit for g, limit in zip(got, limits, strict=True)):
            wrong[key] = f"{got} > {limits}"
    return wrong


@cache
def plugin(case: Case, topology: Topology) -> tuple[Whole, tuple[float, ...]]:
    """What the plugin computes, and Megatron's norm of the gradients in each step."""
    results = on_ranks(train, case, topology)
    return whole(results), tuple(results[0]["log"]["norms"])


def compare(case: Case, topology: Topology, **changes: Any) -> dict[str, str]:
    """The plugin against the oracle, or against one that is changed."""
    result, norms = plugin(case, topology)
    return outside(case, result, computed(case, oracle_for(case, **changes), norms))
