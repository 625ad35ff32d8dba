"""A tiny megatron-core GPT whose weights and gradients are known in TP 1 coordinates.

``train`` runs on every rank of a topology; ``whole.py`` puts what the ranks return together again.
Gradients are written after the reduction, so no forward or backward pass is needed and every
topology gets bit for bit the same ones.
"""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from ranks import run
from whole import Whole, cut, whole

HIDDEN, HEADS, GROUPS, FFN, VOCAB, SEQUENCE = 96, 6, 2, 260, 128, 32
HEAD_SIZE = HIDDEN // HEADS
LAYERS_PREFIX = "decoder.layers."
TIED = "embedding.word_embeddings.weight"

Tensor = torch.Tensor


@dataclass(frozen=True)
class Topology:
    """How the ranks are laid out; none of it may change a result."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    overlap: bool = False
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        flags = "-overlap" * self.overlap + "-sp" * self.sequence_parallel
        return f"{self.tp}x{self.pp}x{self.dp}{flags}"


@dataclass(frozen=True)
class Case:
    """What is computed. ``muon`` and the patterns are tuples so that a case can be a cache key.

    Patterns are fnmatch patterns of TP 1 names with the layer number over all stages. ``faster``
    names parameters that get groups of their own with 3 × lr and, if 2-D, half the weight decay.
    """

    bf16: bool = True
    layers: int = 2
    steps: int = 10
    optimizer: str = "muon"
    lr: float = 0.02
    weight_decay: float = 0.1
    clip: float = 0.0
    tied: bool = False
    gated: bool = False
    faster: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    zero_grads: tuple[str, ...] = ()
    muon: tuple[tuple[str, Any], ...] = ()
    seed: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def lr_at(case: Case, step: int, name: str) -> float:
    """lr of a parameter in step 0, 1, …: it moves, so a value read only at the start is found."""
    return case.lr * (3.0 if matches(name, case.faster) else 1.0) * (1 - 0.03 * step)


# --- whole tensors, the same in every topology -----------------------------------------------


def _normal(shape: tuple[int, ...], *key: object) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randn(shape, generator=generator)


def whole_weight(case: Case, name: str, shape: tuple[int, ...]) -> Tensor:
    """The initial TP 1 weight, fp32, already rounded to the model's dtype."""
    noise = 0.05 * _normal(shape, case.seed, name)
    one = 1.0 if "layernorm.weight" in name else 0.0
    return (one + noise).to(case.dtype).float()


def whole_grad(case: Case, name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """The reduced TP 1 gradient of a step, fp32.

    Scales differ by powers of ten between parameters, and between steps: Muon and AdamW ignore a
    scale that never changes, so a clip that always divides by about the same would not be seen.
    """
    if matches(name, case.zero_grads):
        return torch.zeros(shape)
    scale = 10.0 ** -(zlib.crc32(name.encode()) % 4) * (1.0, 3.0, 0.3, 2.0, 0.5)[step % 5]
    return scale * _normal(shape, case.seed, name, step)


# --- on every rank ---------------------------------------------------------------------------


@dataclass
class Built:
    """A model chunk on one rank, with its parameters by TP 1 name."""

    case: Case
    topology: Topology
    ddp: Any
    params: dict[str, torch.nn.Parameter]
    splits: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    tp_rank: int
    pp_rank: int
    dp_rank: int
    optimizer: Any = None
    log: dict[str, Any] = field(default_factory=dict)

    def whole_slice(self, name: str, full: Tensor) -> Tensor:
        return cut(full, self.splits[name], self.tp_rank, self.topology.tp)


def build(case: Case, topology: Topology) -> Built:
    """Make the model and its DDP buffers on this rank, from slices of the whole weights."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    ps.destroy_model_parallel()
    ps.initialize_model_parallel(topology.tp, topology.pp)
    model_parallel_cuda_manual_seed(case.seed)
    config = _transformer_config(case, topology)
    model = _gpt(case, config)
    names = _global_names(model)
    built = Built(
        case,
        topology,
        None,
        {names[local]: param for local, param in model.named_parameters()},
        *_splits(model, names, case, topology.tp),
        tp_rank=ps.get_tensor_model_parallel_rank(),
        pp_rank=ps.get_pipeline_model_parallel_rank(),
        dp_rank=ps.get_data_parallel_rank(),
    )
    chunk = Float16Module(config, model) if case.bf16 else model
    for name, param in built.params.items():
        full = whole_weight(case, name, built.shapes[name])
        param.data.copy_(built.whole_slice(name, full))
        param.requires_grad_(not matches(name, case.frozen))
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=topology.overlap,
        overlap_param_gather=topology.overlap,
        bucket_size=5_000 if topology.overlap else None,  # several buckets on the first stage
    )
    built.ddp = DistributedDataParallel(config, ddp_config, chunk)
    return built


def _transformer_config(case: Case, topology: Topology) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=case.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=FFN,
        gated_linear_unit=case.gated,
        activation_func=torch.nn.functional.silu if case.gated else torch.nn.functional.gelu,
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        sequence_parallel=topology.sequence_parallel,
        pipeline_dtype=case.dtype,
        params_dtype=case.dtype,
        bf16=case.bf16,
        add_bias_linear=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )


def _gpt(case: Case, config: Any) -> Any:
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="rope",
    )


def _global_names(model: Any) -> dict[str, str]:
    """Local name to TP 1 × PP 1 name: layers count over all stages, a tied copy has one name."""
    first = model.decoder.layers[0].layer_number - 1
    names = {}
    for local, _ in model.named_parameters():
        name = local
        if local.startswith(LAYERS_PREFIX):
            number, rest = local.removeprefix(LAYERS_PREFIX).split(".", 1)
            name = f"{LAYERS_PREFIX}{int(number) + first}.{rest}"
        elif local == "output_layer.weight" and model.share_embeddings_and_output_weights:
            name = TIED
        names[local] = name
    return names


def _splits(
    model: Any, names: Mapping[str, str], case: Case, tp_size: int
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """How each parameter is cut over TP, and its TP 1 shape, both by TP 1 name."""
    splits, shapes = {}, {}
    for local, param in model.named_parameters():
        name, shape = names[local], list(param.shape)
        split = str(param.partition_dim) if getattr(param, "tensor_model_parallel", False) else ""
        if split:
            shape[int(split)] *= tp_size
        if case.gated and ".linear_fc1." in name:
            assert split == "0"
            split = "gated"
        splits[name], shapes[name] = split, tuple(shape)
    return splits, shapes


def make_optimizer(built: Built) -> Any:
    """Megatron's optimizer over the model, by Megatron's own factory."""
    from megatron.core.optimizer import (
        OptimizerConfig,
        get_megatron_optimizer,
        get_standard_config_overrides,
    )
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    case = built.case
    config = OptimizerConfig(
        optimizer=case.optimizer,
        lr=case.lr,
        min_lr=0.0,
        weight_decay=case.weight_decay,
        clip_grad=case.clip,
        bf16=case.bf16,
        params_dtype=case.dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=built.topology.overlap,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
    )
    overrides = get_standard_config_overrides(config)
    if case.faster:
        fast = {id(p) for name, p in built.params.items() if matches(name, case.faster)}
        faster = ParamPredicate(name="faster", fn=lambda p: id(p) in fast)
        decayed = ParamPredicate(name="decayed", fn=lambda p: id(p) in fast and p.dim() > 1)
        overrides[ParamKey(predicate=faster)] = {"max_lr": 3 * case.lr}
        overrides[ParamKey(predicate=decayed)] = {"wd_mult": 0.5}
    return get_megatron_optimizer(config, [built.ddp], config_overrides=overrides)


def set_schedule(built: Built, step: int) -> None:
    """What OptimizerParamScheduler does before a step, with the decay of ``lr_at``."""
    for inner in inner_optimizers(built.optimizer):
        for group in inner.param_groups:
            group["lr"] = group["max_lr"] * (1 - 0.03 * step)
            group["weight_decay"] = built.case.weight_decay * group["wd_mult"]


def distributed_optimizers(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each for each in chained if not each.is_stub_optimizer]


def inner_optimizers(optimizer: Any) -> list[Any]:
    return [each.optimizer for each in distributed_optimizers(optimizer)]


@torch.no_grad()
def write_grads(built: Built, step: int) -> None:
    """Write this step's reduced gradients; what other DP ranks own is spoilt, as it is in a run."""
    built.ddp.zero_grad_buffer()
    for name, param in built.params.items():
        if param.requires_grad:
            full = whole_grad(built.case, name, built.shapes[name], step)
            param.main_grad.copy_(built.whole_slice(name, full))
    for buffer in built.ddp.buffers:
        for bucket in buffer.buckets:
            for owner, shard in enumerate(bucket.grad_data.view(built.topology.dp, -1)):
                if owner != built.dp_rank:
                    shard.mul_(-3.0)


def take_step(built: Built, step: int) -> None:
    set_schedule(built, step)
    write_grads(built, step)
    ok, norm, _ = built.optimizer.step()
    assert ok
    built.log.setdefault("norms", []).append(float(norm))
    if built.topology.overlap:
        built.ddp.start_param_sync(force_sync=True)
    built.optimizer.zero_grad()


def start(case: Case, topology: Topology) -> Built:
    """Model and optimizer, with the plugin installed if the case asks for Muon."""
    import megatron_muon

    built = build(case, topology)
    if case.optimizer == "muon":
        megatron_muon.install(megatron_muon.MuonConfig(**dict(case.muon)))
    try:
        built.optimizer = make_optimizer(built)
    finally:
        if case.optimizer == "muon":
            megatron_muon.uninstall()
    return built


def train(
    case: Case, topology: Topology, mutation: Callable[[], Any] = nullcontext
) -> dict[str, Any]:
    """Take the case's steps on this rank, inside ``mutation()``, and return what it holds then."""
    with mutation():
        built = start(case, topology)
        for step in range(case.steps):
            take_step(built, step)
        return held(built)


def held(built: Built) -> dict[str, Any]:
    """Everything this rank holds, as numpy: whole parameters and the shards it owns."""
    result: dict[str, Any] = {
        "rank": (built.tp_rank, built.pp_rank, built.dp_rank),
        "splits": built.splits,
        "buckets": [len(buffer.buckets) for buffer in built.ddp.buffers],
        "log": built.log,
        "params": {n: p.detach().float().numpy().copy() for n, p in built.params.items()},
        "shards": {},
    }
    names = {id(param): name for name, param in built.params.items()}
    for dist in distributed_optimizers(built.optimizer):
        for param, shard in _owned(dist):
            at = dist._get_model_param_range_map(param)["param"]
            assert shard.numel() == at.end - at.start
            state = {k: v for k, v in dist.optimizer.state[shard].items() if torch.is_tensor(v)}
            kept = {"main": shard, **{k: v for k, v in state.items() if v.numel() == at.size}}
            arrays = {kind: t.detach().float().numpy().copy() for kind, t in kept.items()}
            result["shards"][names[id(param)]] = (at.start, at.end, arrays)
    return result


def _owned(dist: Any) -> Iterable[tuple[Any, Tensor]]:
    """(model parameter, fp32 shard) of a DistributedOptimizer, paired by position as it does."""
    for models, shards in (
        (dist.model_float16_groups, dist.shard_fp32_from_float16_groups),
        (dist.model_fp32_groups, dist.shard_fp32_groups),
    ):
        for model_group, shard_group in zip(models, shards, strict=True):
            yield from zip(model_group, shard_group, strict=True)


# --- from the test's process -----------------------------------------------------------------


def trained(case: Case, topology: Topology, mutation: Callable[[], Any] = nullcontext) -> Whole:
    """Run ``train`` on real ranks and put the results together."""
    return whole(run(train, topology.world_size, case, topology, mutation))


@cache
def truth(case: Case) -> Whole:
    """What one process computes for the case."""
    return trained(case, Topology())
