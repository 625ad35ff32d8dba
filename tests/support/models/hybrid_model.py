"""A MambaModel whose local layers are written down here, and Muon over its real optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

HIDDEN, STATE, HEAD, GROUPS, VOCAB = 64, 16, 16, 4, 128


def planned_by_ranks(pattern: str, tp: int) -> dict[str, Any]:
    """On a rank: the shapes of the model's weights, and the matrices of its plan with homes."""
    from megatron.core import optimizer as core
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    import megatron_muon
    from support.models.gpt import distributed_optimizers

    parallel_state.initialize_model_parallel(tp)
    model_parallel_cuda_manual_seed(1)
    model = _model(pattern, tp)
    ddp = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        Float16Module(model.config, model),
    )
    muon = core.OptimizerConfig(
        optimizer="muon",
        lr=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    megatron_muon.install()
    try:
        (part,) = distributed_optimizers(core.get_megatron_optimizer(muon, [ddp]))
    finally:
        megatron_muon.uninstall()
    shapes = {
        name.removeprefix("module.module."): list(param.shape)
        for name, param in ddp.named_parameters()
    }
    matrices = [(m.name, m.rows, m.cols, m.home) for m in part.muon.plan.matrices]
    return {"shapes": shapes, "matrices": matrices}


def _model(pattern: str, tp: int) -> Any:
    from megatron_muon.lab.dry_run.stand_ins import imported

    mixer = imported("megatron.core.ssm.mamba_mixer")  # without triton, too
    import megatron.core.ssm.mamba_block as block
    from megatron.core.models.mamba import MambaModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = TransformerConfig(
        num_layers=len(pattern),
        hidden_size=HIDDEN,
        num_attention_heads=4,
        mamba_state_dim=STATE,
        mamba_head_dim=HEAD,
        mamba_num_groups=GROUPS,
        is_hybrid_model=True,
        tensor_model_parallel_size=tp,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixer, "HAVE_MAMBA_SSM", True)
        patch.setattr(mixer, "ExtendedRMSNorm", _GatedNorm)
        patch.setattr(block, "TENorm", WrappedTorchNorm)
        return MambaModel(
            config,
            _stack(mixer, block),
            VOCAB * tp,  # padded
            1,
            hybrid_override_pattern=pattern,
            share_embeddings_and_output_weights=True,
        )


class _GatedNorm(torch.nn.Module):
    def __init__(self, size: int, device: Any = None, dtype: Any = None, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))


def _stack(mixer: Any, block: Any) -> Any:
    """The specification of the layers, from Megatron's modules of mixers and of blocks."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add as bda
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm as Norm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    linears = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    fcs = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mamba_mixer = ModuleSpec(mixer.MambaMixer, submodules=mixer.MambaMixerSubmodules(**linears))
    return ModuleSpec(
        block.MambaStack,
        submodules=block.MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                MambaLayer,
                submodules=MambaLayerSubmodules(norm=Norm, mixer=mamba_mixer, mamba_bda=bda),
            ),
            attention_layer=ModuleSpec(
                TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=Norm, self_attention=_attention(), self_attn_bda=bda
                ),
            ),
            mlp_layer=ModuleSpec(
                MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=Norm, mlp=ModuleSpec(MLP, submodules=fcs), mlp_bda=bda
                ),
            ),
        ),
    )


def _attention() -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )
