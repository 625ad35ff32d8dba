"""A small GPT trains on gloo ranks with AdamW and with Muon, and equals one process in fp32."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest
import torch

import megatron_muon
from support.ranks import run

U = 2.0**-24  # fp32 unit roundoff


@dataclass(frozen=True)
class Run:
    """A training run of the tiny model: sizes of the groups, and what is on."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    overlap_reduce: bool = False
    overlap_gather: bool = False
    bf16: bool = False
    optimizer: str = "adam"
    clip: float = 1.0
    unmarked: bool = False  # take away the norms' sequence_parallel mark
    lr: float = 1e-2
    steps: int = 4

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


VOCABULARY, LENGTH, SEQUENCES, LAYERS = 128, 32, 8, 2


def _config(r: Run) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if r.bf16 else torch.float32
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=128,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        bf16=r.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=r.tp,
        pipeline_model_parallel_size=r.pp,
        sequence_parallel=r.sp,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def _model(r: Run) -> Any:
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    config = _config(r)
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        VOCABULARY,
        LENGTH,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    _set_weights(gpt, r)
    for name, param in gpt.named_parameters():
        if "layernorm" in name:
            assert getattr(param, "sequence_parallel", False) == r.sp
            param.sequence_parallel = r.sp and not r.unmarked
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=r.overlap_reduce,
        overlap_param_gather=r.overlap_gather,
        bucket_size=20_000,  # several buckets where the reduction overlaps
        grad_reduce_in_fp32=True,
    )
    return DistributedDataParallel(config, ddp, Float16Module(config, gpt) if r.bf16 else gpt)


def _set_weights(gpt: torch.nn.Module, r: Run) -> None:
    """Every rank cuts its slice from a full tensor that depends on the parameter's name only."""
    from megatron.core.parallel_state import get_tensor_model_parallel_rank

    first = min((layer.layer_number for layer in gpt.decoder.layers), default=1) - 1
    for name, param in gpt.named_parameters():
        if name.startswith("decoder.layers."):
            head, local, tail = name.removeprefix("decoder.").split(".", 2)
            name = f"decoder.{head}.{int(local) + first}.{tail}"
        dim = param.partition_dim if getattr(param, "tensor_model_parallel", False) else None
        shape = list(param.shape)
        if dim is not None:
            shape[dim] *= r.tp
        g = torch.Generator().manual_seed(sum(map(ord, name)) * 1000 + len(name))
        full = torch.randn(shape, generator=g) * (0.1 if len(shape) > 1 else 0.3)
        full += 1.0 if len(shape) == 1 else 0.0  # norms around 1
        if dim is not None:
            halves = full.chunk(2) if "fc1" in name else (full,)  # gate and up are cut apart
            full = torch.cat([h.chunk(r.tp, dim)[get_tensor_model_parallel_rank()] for h in halves])
        param.data.copy_(full)


def _optimizer(r: Run, model: Any) -> Any:
    from megatron.core import optimizer as mcore_optimizer
    from megatron.core.optimizer import OptimizerConfig

    config = OptimizerConfig(
        optimizer=r.optimizer,
        lr=r.lr,
        bf16=r.bf16,
        params_dtype=torch.bfloat16 if r.bf16 else torch.float32,
        use_distributed_optimizer=True,
        overlap_param_gather=r.overlap_gather,
        clip_grad=r.clip,
        weight_decay=0.1,
        adam_eps=1e-4,
    )
    megatron_muon.install()
    try:
        return mcore_optimizer.get_megatron_optimizer(config, [model])
    finally:
        megatron_muon.uninstall()


def _connect(r: Run, model: Any, optimizer: Any) -> None:
    """What megatron.training sets on the configuration before its loop."""
    from megatron.core.distributed import finalize_model_grads

    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    if r.overlap_reduce:
        model.config.no_sync_func = model.no_sync
        model.config.grad_sync_func = model.start_grad_sync
    if r.overlap_gather:
        model.config.param_sync_func = model.start_param_sync


def _forward(batches: Any, model: Any) -> Any:
    tokens = next(batches)
    mask = torch.triu(torch.ones(LENGTH, LENGTH), 1).bool()[None, None]

    def loss(per_token: torch.Tensor) -> Any:
        mean = per_token.float().mean()
        return mean, {"loss": mean.detach().clone()}  # the schedule divides ``mean`` in place

    positions = torch.arange(LENGTH).expand(len(tokens), LENGTH)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), loss


def _train(r: Run) -> dict[str, Any]:
    """Losses (None before the last stage) and gradient norms, and the optimizer's step."""
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    ps.initialize_model_parallel(r.tp, r.pp)
    model_parallel_cuda_manual_seed(1)
    model = _model(r)
    optimizer = _optimizer(r, model)
    _connect(r, model, optimizer)
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=g)
    batches = tokens.chunk(r.dp)[ps.get_data_parallel_rank()].split(2)
    losses, norms = [], []
    for _ in range(r.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        out = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        losses.append(torch.stack([o["loss"] for o in out]).mean().item() if out else None)
        norms.append(norm)
    model.start_param_sync(force_sync=True)
    return {
        "losses": losses,
        "norms": norms,
        "steps": [group["step"] for group in optimizer.param_groups if group["params"]],
        "params": {n: p.detach().float().numpy() for n, p in model.named_parameters()},
        "buckets": sum(len(buffer.buckets) for buffer in model.buffers),
    }


def _curve(r: Run) -> tuple[list[float], list[float]]:
    """Mean losses and gradient norms of a run, after checking that the ranks agree."""
    ranks = run(_train, r.world_size, r)
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"]
        assert rank["steps"] and set(rank["steps"]) == {r.steps}
    last = [rank["losses"] for rank in ranks if rank["losses"][0] is not None]
    assert len(last) == r.world_size // r.pp
    return [sum(at) / len(at) for at in zip(*last, strict=True)], ranks[0]["norms"]


@pytest.mark.parametrize(
    "r",
    [
        Run(dp=2, overlap_reduce=True, overlap_gather=True),
        Run(tp=2),
        Run(tp=2, sp=True),
        Run(pp=2),
        Run(tp=2, pp=2, dp=2, overlap_reduce=True, overlap_gather=True),
        Run(tp=2, pp=2, dp=2, overlap_reduce=True, overlap_gather=True, sp=True),
    ],
    ids=["dp2", "tp2", "tp2+sp", "pp2", "all", "all+sp"],
)
def test_bf16_training_learns(r: Run) -> None:
    losses, _ = _curve(replace(r, bf16=True))
    assert all(b < a for a, b in itertools.pairwise(losses))


@pytest.mark.parametrize(
    "r",
    [
        Run(),
        Run(tp=2, dp=2, sp=True),
        Run(tp=2, pp=2, dp=2, overlap_reduce=True, overlap_gather=True, sp=True),
    ],
    ids=["1", "tp2 x dp2 + sp", "all"],
)
def test_muon_learns_through_forward_and_backward(r: Run) -> None:
    losses, _ = _curve(replace(r, bf16=True, optimizer="muon", lr=2e-2))
    assert all(b < a for a, b in itertools.pairwise(losses))


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("reduce", "gather"), [(True, False), (False, True), (True, True)])
def test_overlap_does_not_change_a_muon_run(reduce: bool, gather: bool, bf16: bool) -> None:
    """Bitwise, with other buckets: a sum of two ranks has one order, and the clip is off."""
    plain = Run(dp=2, optimizer="muon", clip=0.0, bf16=bf16)
    expected = run(_train, 2, plain)
    overlapped = run(_train, 2, replace(plain, overlap_reduce=reduce, overlap_gather=gather))
    assert (overlapped[0]["buckets"] > 1) is reduce and expected[0]["buckets"] == 1
    for one, other in zip(expected, overlapped, strict=True):
        assert one["losses"] == other["losses"]
        for name, param in one["params"].items():
            assert numpy.array_equal(param, other["params"][name]), name


# One process and several differ in fp32 by the order of sums. Roundings in any order are a random
# walk: sqrt(256) u for the mean over 256 tokens and sqrt(64 or 128) u for each of the ten products
# in a row (7 per layer, of which 5 follow each other, and the logits): below 40 u in all. The last
# bit of an fp32 loss is already up to 2 u. 64 u = 3.8e-6 leaves room for four steps of Adam, whose
# eps of 1e-4 keeps small gradients from being blown up to full steps.
REDUCTION = 64 * U


@pytest.mark.parametrize(
    "r",
    [
        Run(dp=2),
        Run(tp=2),
        Run(tp=2, sp=True),
        Run(pp=2),
        Run(tp=2, pp=2, dp=2, overlap_reduce=True, overlap_gather=True, sp=True),
    ],
    ids=["dp2", "tp2", "tp2+sp", "pp2", "all"],
)
def test_fp32_training_equals_one_process(r: Run) -> None:
    losses, norms = _curve(r)
    expected_losses, expected_norms = _curve(Run())
    assert losses == pytest.approx(expected_losses, rel=REDUCTION)
    assert norms == pytest.approx(expected_norms, rel=REDUCTION)


def test_the_comparison_sees_norm_gradients_that_are_not_reduced() -> None:
    norms = _curve(Run(tp=2, sp=True, unmarked=True))[1]
    assert norms[0] != pytest.approx(_curve(Run())[1][0], rel=100 * REDUCTION)
