"""What a run of the tiny GPT computes and on which ranks, and its whole weights and
gradients.
"""

from __future__ import annotations

import fnmatch
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_muon import MuonConfig
from support.installed import VERSION

HIDDEN, HEADS, GROUPS, FFN, VOCAB, SEQUENCE = 96, 6, 2, 260, 128, 32
HEAD_SIZE = HIDDEN // HEADS
# The rows of the in_proj of a Mamba mixer (z, x, B, C, dt) and of a gated delta net
# (query, key, value, z, beta, alpha), as the sizes below make them.
MAMBA = {"mamba_state_dim": 8, "mamba_head_dim": 16, "mamba_num_groups": 6}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
}
IN_PROJ = {
    "mamba": (2 * HIDDEN, 2 * HIDDEN, 48, 48, 12),
    "delta": (48, 48, 144, 144, 12, 12),
}
EXPERTS, MOE_FFN, SHARED_FFN = 4, 68, 100
Q_RANK, KV_RANK, ROPE_HEAD = 48, 40, 8  # multi-latent attention
TIED = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Topology:
    """How the ranks are laid out; none of it may change a result.

    ``dp`` is the pure data-parallel size and ``etp`` the experts' TP size, that of the
    others if None. ``chunks`` are model chunks per pipeline stage, ``instances`` those
    of the distributed optimizer; ``step_overlap`` is Megatron's
    overlap_param_gather_with_optimizer_step; with ``overlap`` a bucket is closed when
    it has ``bucket_size`` elements. ``first_layers`` are the layers of the first stage,
    where it has not as many as the others. ``dispatcher`` is that of experts' tokens.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    overlap: bool = False
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    chunks: int = 1
    instances: int = 1
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    step_overlap: bool = False
    bucket_size: int = 5_000  # several buckets on the first stage
    first_layers: int | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @classmethod
    def of(cls, words: str) -> Topology:
        """The one that ``str`` says so: ``tp2 dp3 overlap sp``."""
        said: dict[str, Any] = {}
        for word in re.sub(r"\bsp\b", "sequence_parallel", words).split():
            name, size = re.findall(r"(\D+)(\d*)", word)[0]
            said[name] = int(size) if size else True
        return cls(**said)

    def __str__(self) -> str:
        said = _not_default(self)
        words = [n if value is True else f"{n}{value}" for n, value in said.items()]
        return " ".join(words).replace("sequence_parallel", "sp") or "one rank"


def _not_default(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as its defaults."""
    values = {each: getattr(record, each.name) for each in fields(record)}
    return {each.name: value for each, value in values.items() if value != each.default}


@dataclass(frozen=True)
class Case:
    """What is computed. ``muon`` and the patterns are tuples so that a case can be a
    cache key.

    Patterns are fnmatch patterns of TP 1 names with the layer number over all stages
    and the expert number over all expert-parallel ranks. ``faster`` names parameters
    that get groups of their own with 3 × lr and, if 2-D, half the weight decay. ``moe``
    makes every MLP a mixture of experts with a shared one, but those of the first
    ``dense_layers``; by ``grouped`` they are Megatron's SequentialMLP, its legacy
    GroupedMLP or Transformer Engine's grouped linears. The down projections of ``mla``
    are column-parallel or, as Transformer Engine's are, duplicated; with
    ``latent_biases`` its up projections have biases, which takes a spec of one's own.
    ``zero_grads`` have no gradient from step ``zero_from`` on. ``overflow`` are ``(step, pattern)``: an inf
    in that step's gradient. ``output_gate`` is Megatron's attention_output_gate.
    ``fp8`` is the recipe of Transformer Engine's by which the linears' weights are fp8
    (--fp8-param-gather). By ``mixer`` layers have a Mamba mixer or a gated delta net in
    place of attention; no forward pass of theirs is run. ``qk_clip`` are Megatron's
    threshold and alpha. ``rms_norm``, ``shared`` (experts), ``recompute`` and
    ``dropout`` are the model's, ``loss_scale``, ``scale_window`` and ``adam_eps`` the
    optimizer's. With ``sinks`` the softmax of each head has a learnable offset, with
    ``expert_biases`` each expert's linear layers have biases, which is from core 0.15
    on and without a shared expert. With ``narrow``, settings of OptimizerConfig, states
    are held by precision-aware FusedAdam. Without ``te_attention`` a model of
    Transformer Engine's layers has Megatron's own attention.
    """

    bf16: bool = True
    layers: int = 2
    steps: int = 3  # with other scales of the gradient each
    optimizer: str = "muon"
    lr: float = 0.02
    weight_decay: float = 0.1
    clip: float = 0.0
    tied: bool = False
    gated: bool = False
    faster: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    islands: tuple[
        str, ...
    ] = ()  # weights that stay in fp32, as Megatron's keep_in_fp32 has it
    zero_grads: tuple[str, ...] = ()
    zero_from: int = 0
    muon: tuple[tuple[str, Any], ...] = ()
    seed: int = 1
    fp16: bool = False
    fp32_grads: bool = True
    moe: bool = False
    dense_layers: int = 0
    grouped: Literal["", "legacy", "te"] = ""
    mla: Literal["", "column", "duplicated"] = ""
    latent_biases: bool = False
    mtp: bool = False
    overflow: tuple[tuple[int, str], ...] = ()
    heads: int = HEADS
    groups: int = GROUPS
    output_gate: bool = False
    ffn: int = FFN
    vocab: int = VOCAB
    mixer: Literal["", "mamba", "delta"] = ""
    fp8: str = ""
    qk_clip: tuple[float, float] | None = None
    te_attention: bool = True
    sinks: bool = False
    rms_norm: bool = False
    shared: bool = True
    expert_biases: bool = False
    recompute: bool = False
    dropout: float = 0.0
    loss_scale: float = 2.0**12
    scale_window: int = 3  # so that the scale grows within five steps
    adam_eps: float = 1e-8
    narrow: tuple[tuple[str, Any], ...] | None = None

    @property
    def head_size(self) -> int:
        return HIDDEN // self.heads

    @property
    def dtype(self) -> torch.dtype:
        if self.fp16:
            assert not self.bf16, "choose one of bf16 and fp16"
            return torch.float16
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def settings(self) -> MuonConfig:
        """Those that ``muon`` says."""
        return MuonConfig(**dict(self.muon))

    def overflows(self, step: int) -> bool:
        return any(at == step for at, _ in self.overflow)

    def with_muon(self, **settings: Any) -> Case:
        """The case with these settings of Muon, too; a later value counts."""
        return replace(self, muon=tuple({**dict(self.muon), **settings}.items()))

    def with_narrow(self, **settings: Any) -> Case:
        """The same of ``narrow``."""
        narrow = {**dict(self.narrow or ()), **settings}
        return replace(self, narrow=tuple(narrow.items()))

    def __str__(self) -> str:
        """What is not as in ``Case()``."""
        said = _not_default(self)
        said |= dict(said.pop("muon", ()))
        return "-".join(f"{name}={value}" for name, value in said.items()) or "plain"


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def lr_at(case: Case, step: int, name: str) -> float:
    """lr of a parameter in step 0, 1, …: it moves, so a value read only at the start is
    found.
    """
    return case.lr * (3.0 if matches(name, case.faster) else 1.0) * (1 - 0.03 * step)


def muon_weights(case: Case) -> set[str]:
    """The names of all that Muon must have, from the model's plan alone."""
    names = {
        f"decoder.layers.{layer}.{weight}"
        for layer in range(case.layers)
        for weight in _layer_matrices(case, case.moe and layer >= case.dense_layers)
    }
    if case.mtp:
        names.add("mtp.layers.0.eh_proj.weight")
        inner = "transformer_layer" if VERSION < (0, 17) else "mtp_model_layer"
        names |= {
            f"mtp.layers.0.{inner}.{weight}"
            for weight in _layer_matrices(case, case.moe)
        }
    return names


def _layer_matrices(case: Case, moe: bool) -> Iterator[str]:
    if case.mla:
        for end in ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj"):
            yield f"self_attention.linear_{end}.weight"
    elif case.mixer == "mamba":
        yield from ("mixer.in_proj.weight", "mixer.out_proj.weight")
        return
    elif case.mixer == "delta":
        yield from ("self_attention.in_proj.weight", "self_attention.out_proj.weight")
    else:
        yield from (
            "self_attention.linear_qkv.weight",
            "self_attention.linear_proj.weight",
        )
    if not moe:
        yield from ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
        return
    yield "mlp.router.weight"
    yield from (
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.linear_fc2.weight",
    )
    if case.grouped == "legacy":
        yield from ("mlp.experts.weight1", "mlp.experts.weight2")
        return
    for expert in range(EXPERTS):
        for fc in ("linear_fc1", "linear_fc2"):
            te, sequential = (
                f"{fc}.weight{expert}",
                f"local_experts.{expert}.{fc}.weight",
            )
            yield f"mlp.experts.{te if case.grouped else sequential}"


# --- whole tensors, the same in every topology ----------------------------------------


def _normal(shape: tuple[int, ...], *key: object) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randn(shape, generator=generator)


def whole_weight(case: Case, name: str, shape: tuple[int, ...]) -> Tensor:
    """The initial TP 1 weight, fp32, already rounded to the model's dtype."""
    before, mark, which = name.partition(".experts.weight")
    if mark:  # a batch of what SequentialMLP's experts have, transposed
        experts = (
            f"{before}.experts.local_experts.{e}.linear_fc{which}.weight"
            for e in range(shape[0])
        )
        inner = (shape[2], shape[1])
        return torch.stack([whole_weight(case, one, inner).T for one in experts])
    noise = 0.05 * _normal(shape, case.seed, name)
    # fused into a linear, too
    one = 1.0 if name.endswith(("norm.weight", "norm_weight")) else 0.0
    return (one + noise).to(case.dtype).float()


def whole_grad(case: Case, name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """The reduced TP 1 gradient of a step, fp32.

    Scales differ by powers of ten between parameters, and between steps: Muon and AdamW
    ignore a scale that never changes, so a clip that always divides by about the same
    would not be seen.
    """
    if step >= case.zero_from and matches(name, case.zero_grads):
        return torch.zeros(shape)
    scale = (
        10.0 ** -(zlib.crc32(name.encode()) % 4) * (1.0, 3.0, 0.3, 2.0, 0.5)[step % 5]
    )
    grad = scale * _normal(shape, case.seed, name, step)
    if any(at == step and matches(name, (pattern,)) for at, pattern in case.overflow):
        grad.view(-1)[0] = float("inf")
    return grad
