"""A tiny megatron-core GPT whose weights and gradients are known in TP 1, EP 1
coordinates.

``train`` runs on every rank of a topology; ``runs/whole.py`` puts together again what
the ranks return. Gradients are written after the reduction, so no forward or backward
pass is needed and every topology gets bit for bit the same ones.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_muon import MuonConfig, numbers
from support.installed import installed, lacks
from support.models.gpt_model import (
    UNUSED,
    Place,
    global_names,
    gpt,
    initialize_parallel_state,
    piece_of,
    this_place,
    transformer_config,
)
from support.models.gpt_optimizer import (  # noqa: F401 for those who import from here
    ON_HOST,
    distributed_optimizers,
    inner_optimizers,
    make_optimizer,
    optimizer_config,
)
from support.ranks import error_of, run
from support.runs.cases import (  # noqa: F401 as well
    FFN,
    GROUPS,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    SEQUENCE,
    TIED,
    VOCAB,
    Case,
    Topology,
    lr_at,
    matches,
    muon_weights,
    whole_grad,
    whole_weight,
)
from support.runs.whole import Piece, Whole, cut, differences, whole
from support.te_on_cpu.adam import master_of

MEGATRONS = "megatron's muon"  # a case's optimizer: see megatrons_muon

# --- on every rank --------------------------------------------------------------------


@dataclass
class Built:
    """The model chunks of one rank, each in its DDP, with their parameters by TP 1
    name.
    """

    case: Case
    topology: Topology
    place: Place
    chunks: list[Any]
    params: dict[str, torch.nn.Parameter]
    pieces: dict[str, Piece]
    optimizer: Any = None
    log: dict[str, Any] = field(default_factory=dict)

    @property
    def ddp(self) -> Any:
        (only,) = self.chunks
        return only

    @property
    def names(self) -> dict[int, str]:
        """The names of its parameters, by their ``id``."""
        return {id(param): name for name, param in self.params.items()}

    @property
    def tp_rank(self) -> int:
        return self.place.tp_rank

    @property
    def pp_rank(self) -> int:
        return self.place.pp_rank

    @property
    def dp_rank(self) -> int:
        return self.place.dp_rank

    @property
    def parts(self) -> list[Any]:
        """Its DistributedOptimizers, the experts' too."""
        return distributed_optimizers(self.optimizer)

    @property
    def part(self) -> Any:
        (only,) = self.parts
        return only

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters of all inner optimizers."""
        return [
            group
            for inner in inner_optimizers(self.optimizer)
            for group in inner.param_groups
        ]

    @property
    def groups(self) -> list[Any]:
        """Megatron's bucket groups, the experts' too."""
        return [*self.ddp.bucket_groups, *self.ddp.expert_parallel_bucket_groups]

    def buffers(self) -> Iterator[Any]:
        """Megatron's grad buffers, the experts' too; each is sharded over a group of
        its own.
        """
        for chunk in self.chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    def local(
        self, name: str, whole_tensor: Callable[..., Tensor], *args: Any
    ) -> Tensor:
        """This rank's part of ``whole_tensor(case, name, whole shape, *args)``."""
        piece, param = self.pieces[name], self.params[name]
        if name.startswith(UNUSED):
            return torch.zeros(param.shape)
        full = whole_tensor(self.case, name, piece.whole_shape, *args)
        return cut(full, piece).reshape(param.shape)


def build(case: Case, topology: Topology) -> Built:
    """Make the model and its DDP buffers on this rank, from slices of the whole
    weights.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    initialize_parallel_state(topology)
    model_parallel_cuda_manual_seed(case.seed)
    config = transformer_config(case, topology)
    built = Built(case, topology, this_place(), [], {}, {})
    stages = range(topology.chunks) if topology.chunks > 1 else [None]
    models = [gpt(case, config, vp_stage) for vp_stage in stages]
    for model in models:
        names = global_names(model, built.place, topology)
        for local, param in model.named_parameters():
            name = names[local]
            assert name not in built.params, f"two parameters are {name}"
            built.params[name] = param
            built.pieces[name] = piece_of(name, param, case, built.place, topology)
            with torch.no_grad():
                param.copy_(built.local(name, whole_weight))
            # of fp8: main parameters' start
            if hasattr(param, "get_high_precision_init_val"):
                param._high_precision_init_val = built.local(name, whole_weight)
            param.requires_grad_(not matches(name, case.frozen))
    ddp_config = _ddp_config(case, topology)
    built.chunks = [
        _in_ddp(model, index, built, ddp_config) for index, model in enumerate(models)
    ]
    return built


def _ddp_config(case: Case, topology: Topology) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.fp32_grads,
        use_distributed_optimizer=case.optimizer != MEGATRONS,
        fp8_param_gather=bool(case.fp8),
        **({"reuse_grad_buf_for_mxfp8_param_ag": True} if case.fp8 == "mxfp8" else {}),
        overlap_grad_reduce=topology.overlap,
        overlap_param_gather=topology.overlap,
        bucket_size=topology.bucket_size if topology.overlap else None,
        num_distributed_optimizer_instances=topology.instances,
    )


def _in_ddp(model: Any, index: int, built: Built, ddp_config: Any) -> Any:
    """The model wrapped as Megatron-LM's get_model does, all chunks with one config."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    case = built.case
    wrapped = (
        Float16Module(model.config, model) if case.dtype != torch.float32 else model
    )
    for name, param in model.named_parameters():
        param.data = param.data.float() if matches(name, case.islands) else param.data
    return DistributedDataParallel(
        model.config,
        ddp_config,
        wrapped,
        disable_bucketing=index > 0 or built.topology.step_overlap,
    )


@contextmanager
def each_chunk(change: Callable[[Any], object]) -> Iterator[None]:
    """Within it ``change`` is given each chunk that is made, in its DDP."""
    in_ddp = _in_ddp

    def changed(*args: Any) -> Any:
        chunk = in_ddp(*args)
        change(chunk)
        return chunk

    with mock.patch.object(sys.modules[__name__], "_in_ddp", changed):
        yield


def set_schedule(built: Built, step: int) -> None:
    """What OptimizerParamScheduler does before a step, with the decay of ``lr_at``."""
    for group in built.param_groups:
        group["lr"] = group["max_lr"] * group["lr_mult"] * (1 - 0.03 * step)
        decay = group.get("end_wd")
        decay = built.case.weight_decay if decay is None else decay
        group["weight_decay"] = decay * group["wd_mult"]


@torch.no_grad()
def write_grads(built: Built, step: int) -> None:
    """Write this step's reduced gradients, times the loss scale, a power of two; what
    other DP ranks own is spoilt, as it is in a run.
    """
    scale = float(built.optimizer.get_loss_scale()) if built.case.fp16 else 1.0
    for chunk in built.chunks:
        chunk.zero_grad_buffer()
    for name, param in built.params.items():
        if param.requires_grad:
            param.main_grad.copy_(built.local(name, whole_grad, step) * scale)
    for buffer in built.buffers():
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            for owner, shard in enumerate(bucket.grad_data.view(group.size(), -1)):
                if owner != group.rank():
                    shard.mul_(-3.0)


def prepare_step(built: Built, step: int) -> None:
    """All that comes before ``optimizer.step()``."""
    getattr(
        built.optimizer, "offload_optimizer_state_for_forward", lambda: None
    )()  # dev's
    set_schedule(built, step)
    write_grads(built, step)


def take_step(
    built: Built, step: int, after: Callable[[], object] = lambda: None
) -> None:
    """Take a step, then call ``after``, before an overlapped gather of the parameters
    ends.
    """
    prepare_step(built, step)
    if built.case.fp16:
        scale = float(built.optimizer.get_loss_scale())
        built.log.setdefault("loss_scales", []).append(scale)
    ok, norm, _ = built.optimizer.step()
    assert ok is not built.case.overflows(step), f"step {step}: successful is {ok}"
    built.log.setdefault("norms", []).append(float(norm) if ok else None)
    if "log_interval" in dict(built.case.muon):
        built.log.setdefault("numbers", []).append(numbers(built.optimizer))
    after()
    if built.topology.overlap and built.case.fp8 == "mxfp8":
        _gather_through_gradients(built)
    elif built.topology.overlap:
        for chunk in built.chunks:
            chunk.start_param_sync(force_sync=True)
    built.optimizer.zero_grad()


def _gather_through_gradients(built: Built) -> None:
    """As Megatron-LM's loop and its forward pass do with
    ``reuse_grad_buf_for_mxfp8_param_ag``.
    """
    for chunk in built.chunks:
        chunk.zero_grad_buffer()
    for part in built.parts:
        part._copy_main_params_to_param_buffer()
    for chunk in built.chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.start_param_sync()
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def start(case: Case, topology: Topology, *, plugin: bool = False) -> Built:
    """Model and optimizer, with the plugin installed for Muon, and with ``plugin`` for
    AdamW.
    """
    plugin = plugin or case.optimizer == "muon"
    with installed(case.settings) if plugin else nullcontext():
        built = build(case, topology)
        built.optimizer = make_optimizer(built)
    return built


def take_steps(built: Built, steps: Iterable[int]) -> None:
    for step in steps:
        take_step(built, step)


def stepped(case: Case, topology: Topology, steps: int | None = None) -> Built:
    """A run that has taken so many steps, or the case's."""
    built = start(case, topology)
    take_steps(built, range(case.steps if steps is None else steps))
    return built


def error_of_start(case: Case, topology: Topology) -> str:
    """What starting a run raises, as text."""
    return error_of(lambda: start(case, topology))


def error_of_optimizer(built: Built, **settings: Any) -> str:
    """What making the optimizer with the plugin and these settings raises, as text."""
    with installed(MuonConfig(**settings)):
        return error_of(lambda: make_optimizer(built))


def error_of_building(case: Case, topology: Topology, settings: dict[str, Any]) -> str:
    """``error_of_optimizer`` of a model that is built on this rank."""
    return error_of_optimizer(build(case, topology), **settings)


def printed_by(call: Callable[[], Any]) -> tuple[Any, str]:
    """What a call returns, and what it prints."""
    with redirect_stdout(io.StringIO()) as printed:
        result = call()
    return result, printed.getvalue()


def train(
    case: Case, topology: Topology, mutation: Callable[[], Any] = nullcontext
) -> dict[str, Any]:
    """Take the case's steps on this rank, inside ``mutation()``, and return what it
    holds then.
    """
    with mutation():
        return held(stepped(case, topology))


def held(built: Built) -> dict[str, Any]:
    """Everything this rank holds, as numpy: whole parameters and the shards it owns."""
    names = built.names
    result: dict[str, Any] = {
        "rank": (built.tp_rank, built.pp_rank, built.dp_rank),
        "pieces": built.pieces,
        "buckets": [len(buffer.buckets) for buffer in built.buffers()],
        "log": built.log,
        "params": {n: plain(p).numpy().copy() for n, p in built.params.items()},
        "owners": {
            names[id(param)]: tuple(torch.distributed.get_process_group_ranks(group))
            for buffer in built.buffers()
            for group in [buffer.data_parallel_group]
            for param in buffer.param_index_map
        },
        "shards": {},
        "optimizers": len(built.parts),
    }
    for dist in built.parts:
        for param, shard in _owned(dist):
            at = dist._get_model_param_range_map(param)["param"]
            assert shard.numel() == at.end - at.start
            state = _state(dist, shard, built.case)
            main = main_of(shard, state.pop("master_param", None))
            kept = {
                "main": main,
                **{k: v for k, v in state.items() if v.numel() == at.size},
            }
            arrays = {
                kind: t.detach().float().numpy().copy() for kind, t in kept.items()
            }
            assert names[id(param)] not in result["shards"], (
                "two optimizers own a parameter"
            )
            result["shards"][names[id(param)]] = (at.start, at.end, arrays)
    for kind in ("params", "owners", "shards"):
        result[kind] = {
            n: v for n, v in result[kind].items() if not n.startswith(UNUSED)
        }
    return result


def are_unchanged(built: Built, before: dict[str, Any]) -> bool:
    """Whether main parameters and state here are those of ``held(built)["shards"]``."""
    after = held(built)["shards"]
    return all(
        (states[kind] == after[name][2][kind]).all()
        for name, (_, _, states) in before.items()
        for kind in states
    )


def _state(dist: Any, shard: Tensor, case: Case) -> dict[str, Tensor]:
    """A shard's tensors by Adam's names, as values; Muon's may be on the host."""
    if case.narrow is not None and ON_HOST in case.narrow and case.optimizer == "muon":
        own = dist.muon.rule.state_keys
        keys = own if dist.muon.owns(shard) else ["exp_avg", "exp_avg_sq"]
        state = {key: dist.states.get(shard, key) for key in keys}
        return {**state, "master_param": dist.states.get(shard, "param")}
    state = {k: v for k, v in dist.optimizer.state[shard].items() if torch.is_tensor(v)}
    if case.narrow is not None and ON_HOST not in case.narrow:
        return {k: dist.optimizer.get_unscaled_state(shard, k) for k in state}
    if "momentum_dtype" in dict(case.muon):
        return {key: dist.states.get(shard, key) for key in state}
    return state


def main_of(shard: Tensor, master: Tensor | None) -> Tensor:
    """An fp32 main parameter; FusedAdam's may be the lower 16 bits of what a bf16
    weight rounds.
    """
    if master is None or shard.dtype == torch.float32:
        return shard
    return master_of(shard, master) if master.dtype == torch.int16 else master


def plain(param: Tensor) -> Tensor:
    """A parameter's values in fp32; those in fp8 are dequantized."""
    value = param.detach()
    return (value.dequantize() if hasattr(value, "_get_quantizer") else value).float()


def _owned(dist: Any) -> Iterable[tuple[Any, Tensor]]:
    """(model parameter, its shard) of a DistributedOptimizer, paired by position as it
    does.
    """
    mains = dist.shard_fp32_from_float16_groups
    in_adam = any(main is None for group in mains for main in group)  # with ``narrow``
    for models, shards in (
        (dist.model_float16_groups, dist.shard_float16_groups if in_adam else mains),
        (dist.model_fp32_groups, dist.shard_fp32_groups),
    ):
        for model_group, shard_group in zip(models, shards, strict=True):
            yield from zip(model_group, shard_group, strict=True)


# --- from the test's process ----------------------------------------------------------


def on_ranks(
    fn: Callable[..., Any],
    case: Case,
    topology: Topology,
    *args: Any,
    timeout: float | None = None,
) -> list[Any]:
    """What ``fn(case, topology, *args)`` returns on each rank of the topology. A test is
    skipped where the installed Megatron has not what the case needs.
    """
    lacking = lacks(case, topology)
    if lacking:
        pytest.skip(lacking)
    size = topology.world_size
    limit = max(120.0, 15.0 * size) if timeout is None else timeout
    return run(fn, size, case, topology, *args, timeout=limit)


def trained(
    case: Case, topology: Topology, mutation: Callable[[], Any] = nullcontext
) -> Whole:
    """Run ``train`` on real ranks and put the results together."""
    return whole(on_ranks(train, case, topology, mutation))


@cache
def truth(case: Case) -> Whole:
    """What one process computes for the case."""
    return trained(case, Topology())


def check(case: Case, topology: Topology) -> Whole:
    """Compare with one process; what was computed is returned for further looks."""
    result = trained(case, topology)
    if case.optimizer == "muon" and case.steps:  # they have Muon's state and not Adam's
        assert result["main"].keys() - result["exp_avg_sq"].keys() == muon_weights(case)
    assert differences(truth(case), result) == []
    return result


def runs_of(table: dict[str, tuple[Any, ...]]) -> list[Any]:
    """Parameters ``(case, topology)``: of each name a case, its topologies by their
    words, and those that are slow, if any.
    """
    return [
        pytest.param(
            case,
            Topology.of(words),
            id=f"{name}-{words}",
            marks=[pytest.mark.slow] * is_slow,
        )
        for name, (case, *texts) in table.items()
        for is_slow, text in enumerate(texts)
        for words in filter(None, text.split(", "))
    ]
