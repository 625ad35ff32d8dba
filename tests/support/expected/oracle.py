"""Muon with AdamW for the rest, in float64 on whole matrices, written from the papers.

Muon: "Muon is Scalable for LLM Training" (arXiv 2502.16982, Algorithm 1, eq. 4),
Newton-Schulz as in Keller Jordan's post. AdamW: arXiv 1711.05101 with Transformer
Engine's grouping of the terms. Shares no code with the package, so that the two can
disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


def exact(value: Tensor) -> Tensor:
    """The rounding of exact arithmetic: none. Tests put others in its place to bound
    errors.
    """
    return value


def exact_norm(x: Tensor, way: int) -> Tensor:
    """‖x‖. Tests put another in its place, which a sum in fp32 has made larger (``way``
    1) or smaller (-1): the way in which a step's errors add up.
    """
    return x.norm()


@dataclass(frozen=True)
class Decay:
    """What the decay of a matrix takes from each weight in one step, if it does; it
    does where direction and weight do not have opposite signs.
    """

    name: str
    rows: Sequence[int] | int
    direction: Tensor
    size: Tensor


def newton_schulz(
    u: Tensor,
    steps: int = 5,
    rounded: Callable[[Tensor], Tensor] = exact,
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
    coefficients: Sequence[tuple[float, float, float]] = ((3.4445, -4.7750, 2.0315),),
    norm: Callable[[Tensor, int], Tensor] = exact_norm,
) -> Tensor:
    """Approximate U Vᵀ of ``u`` = U S Vᵀ, shape [rows, cols], in the dtype of ``u``.

    ``coefficients`` are those of each step; the last one's stay.
    """
    length = norm(u, -1)
    if length == 0:
        return torch.zeros_like(u)
    tall = u.shape[0] > u.shape[1]
    x = rounded(u.T if tall else u)
    x = rounded(x / length)
    for step in range(steps):
        a, b, c = coefficients[min(step, len(coefficients) - 1)]
        gram = rounded(product(x, x.T))
        polynomial = rounded(b * gram + c * rounded(product(gram, gram)))
        x = rounded(a * x + rounded(product(polynomial, x)))
    return x.T if tall else x


def qkv_rows(
    heads: int, groups: int, head_size: int, gated: bool = False
) -> list[list[int]]:
    """Rows of Q, of K and of V in Megatron's fused weight: per query group its q, k and
    v rows, and of a gated attention those of the gate after q's.
    """
    q_rows = heads // groups * head_size
    sizes = (q_rows, *((q_rows,) if gated else ()), head_size, head_size)
    rows: list[list[int]] = [[] for _ in sizes]
    start = 0
    for _ in range(groups):
        for part, size in enumerate(sizes):
            rows[part].extend(range(start, start + size))
            start += size
    return rows


def is_muon(name: str, w: Tensor) -> bool:
    """Every 2-D weight that is neither an embedding nor the output layer, and legacy
    experts.
    """
    if w.ndim == 3:  # [experts, in, out]
        return ".experts." in name
    return w.ndim == 2 and "embedding" not in name and "output_layer" not in name


@dataclass
class Oracle:
    """One step after the other on a dict of whole (TP 1) weights, all float64.

    ``weights`` is updated in place; ``momentum`` holds M (AdamW: m) after the steps
    taken. ``lr`` and ``weight_decay`` are called with a name and its weight. Tests
    replace the fields from ``nesterov`` on, to show that a mutant is noticed or to
    model rounding.
    """

    weights: dict[str, Tensor]
    heads: int
    groups: int
    head_size: int
    lr: Callable[[str], float]
    weight_decay: Callable[[str, Tensor], float]
    rms: float = 0.2
    mu: float = 0.95
    warm_up: tuple[float, int] | None = None  # of mu: its start, and its steps
    ns_steps: int = 5
    split_qkv: bool = True
    gated_attention: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float = 0.0
    nesterov: bool = True
    blocks: Callable[[str, Tensor], list[list[int]]] | None = None
    scale_size: Callable[[str, int, int], int] = lambda name, rows, cols: max(
        rows, cols
    )
    is_muon: Callable[[str, Tensor], bool] = is_muon
    orthogonalize: Callable[[Tensor, int], Tensor] = newton_schulz
    rounded: Callable[[Tensor], Tensor] = exact
    norm: Callable[[Tensor, int], Tensor] = exact_norm
    momentum: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    # what a decay of lr · λ is multiplied by: 1 / the largest rate, if independent
    decay_factor: Callable[[str], float] = lambda name: 1.0
    update_norm: bool = False  # eq. 6
    cautious: bool = False  # arXiv 2510.12402
    opposed: Callable[[Tensor, Tensor], Tensor] = lambda w, direction: w * direction < 0
    decays: list[Decay] = field(default_factory=list)  # of cautious decay, in order
    radii: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    rule: str = (
        ""  # hyperball (arXiv 2606.16899: norms of matrices stay), namo, normuon
    )
    beta2: float = 0.95
    eps2: float = 1e-8
    moments: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)

    def step(self, grads: Mapping[str, Tensor], norm: float | None = None) -> None:
        """Take one step with whole gradients, named as the weights; clip by ``norm`` if
        given.
        """
        squares = torch.stack([g.double().square().sum() for g in grads.values()])
        self.norms.append(float(squares.sum().sqrt()))
        clip = self.clip / ((norm or self.norms[-1]) + 1e-6) if self.clip > 0 else 1.0
        for name, w in self.weights.items():
            g = grads[name].double()
            g = self.rounded(clip * g) if clip < 1 else g
            (self._muon if self.is_muon(name, w) else self._adamw)(name, w, g)

    def _muon(self, name: str, w: Tensor, g: Tensor) -> None:
        r, lr = self.rounded, self.lr(name)
        mu = self.mu
        if self.warm_up is not None:
            start, steps = self.warm_up
            mu = start + (mu - start) * min(1.0, (len(self.norms) - 1) / steps)
        m = r(r(mu * self.momentum.get(name, torch.zeros_like(w))) + g)
        self.momentum[name] = m
        u = r(g + r(mu * m)) if self.nesterov else m
        decay = lr * self.weight_decay(name, w) * self.decay_factor(name)
        before = w.clone()
        w.copy_(r(w * (1 - decay)))
        for number, rows in enumerate(self.matrices(name, w)):
            direction = self.orthogonalize(u[rows], self.ns_steps)
            if self.rule == "namo":
                alpha = self._namo((name, number), g[rows], u[rows])
                w[rows] = r(before[rows] * (1 - alpha * decay))
                direction = r(alpha * direction)
            if self.rule == "normuon":
                direction = self._normuon((name, number), direction)
            if self.rule == "hyperball":
                radius = self.norm(w[rows], 1)
                radius = self.radii.setdefault((name, number), radius)
                length = r(self.norm(direction, -1))
                step = r(direction / length) if length > 0 else direction
                moved = r(w[rows] - r(lr * radius * step))
                w[rows] = r(radius * r(moved / r(self.norm(moved, -1))))
                continue
            if self.cautious:
                opposed = self.opposed(before[rows], direction)
                size = (before[rows] - w[rows]).abs()
                self.decays.append(Decay(name, rows, direction, size))
                w[rows] = torch.where(opposed, before[rows], w[rows])
            if self.update_norm and direction.norm() > 0:
                length = r(self.norm(direction, -1))
                root_mean = length / math.sqrt(direction.numel())
                size = self.scale_size(name, *direction.shape)
                direction = r(direction / root_mean) / math.sqrt(size)
            scale = lr * self.rms * math.sqrt(self.scale_size(name, *direction.shape))
            w[rows] = r(w[rows] - r(scale * direction))

    def _normuon(self, unit: tuple[str, int], direction: Tensor) -> Tensor:
        """NorMuon (arXiv 2510.05491, algorithm 1, lines 6 to 9) along the long side."""
        rows, cols = direction.shape
        mean = direction.square().mean(dim=1 if rows >= cols else 0, keepdim=True)
        before = self.moments.get(unit, torch.zeros_like(mean))
        after = self.beta2 * before + (1 - self.beta2) * mean
        self.moments[unit] = after
        made = direction / (after.sqrt() + self.eps2)
        length = self.norm(made, -1)
        return self.rounded(made * math.sqrt(min(rows, cols)) / length)

    def _namo(self, unit: tuple[str, int], g: Tensor, u: Tensor) -> Tensor:
        """NAMO (arXiv 2602.17080, algorithm 1), with the sum u in place of a mean."""
        taken = len(self.norms)
        before = self.moments.get(unit, torch.zeros((), dtype=g.dtype))
        v = self.beta2 * before + (1 - self.beta2) * self.norm(g, -1).square()
        self.moments[unit] = v
        # Nesterov's sum has the weights of one more step
        power = taken + 1 if self.nesterov else taken
        mean = (1 - self.mu) * self.norm(u, 1) / (1 - self.mu**power)
        return self.rounded(
            math.sqrt(1 - self.beta2**taken) * mean / (v.sqrt() + self.eps2)
        )

    def matrices(self, name: str, w: Tensor) -> list[list[int]] | range:
        """The rows of each matrix of a weight; of legacy experts, the number of
        each.
        """
        if w.ndim == 3:
            return range(w.shape[0])
        if self.blocks is not None:
            return self.blocks(name, w)
        if self.split_qkv and name.endswith("linear_qkv.weight"):
            return qkv_rows(
                self.heads, self.groups, self.head_size, self.gated_attention
            )
        return [list(range(w.shape[0]))]

    def _adamw(self, name: str, w: Tensor, g: Tensor) -> None:
        r, (beta1, beta2), taken = self.rounded, self.betas, len(self.norms)
        zero = torch.zeros_like(w)
        m = r(r(beta1 * self.momentum.get(name, zero)) + r((1 - beta1) * g))
        v = r(r(beta2 * self.second.get(name, zero)) + r((1 - beta2) * r(g * g)))
        self.momentum[name], self.second[name] = m, v
        m_hat = r(m / (1 - beta1**taken))
        v_hat = r(v / (1 - beta2**taken))
        update = r(m_hat / r(r(v_hat.sqrt()) + self.eps))
        update = r(update + r(self.weight_decay(name, w) * w))
        w.copy_(r(w - r(self.lr(name) * update)))
