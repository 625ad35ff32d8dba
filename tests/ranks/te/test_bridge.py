"""Megatron-Bridge's own Python over the plugin: its optimizer setup, and its
pretrain().

Where PYTHONPATH has the ``src`` of a clone. Transformer Engine's compiled module is a
stub, and its attention Megatron's local one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import megatron_muon
from megatron_muon.cpu import training
from megatron_muon.runtime.patches import Patches
from support import te_on_cpu
from support.models.gpt import Case, Topology, build, held, write_grads
from support.ranks import run
from support.runs.topologies import DP2, ONE, TP2
from support.runs.whole import differences, whole

OPTIM = "megatron.bridge.training.optim"
CASE = Case(steps=4)
SETTINGS = CASE.settings
# what Bridge's Kimi K2 recipe says to Megatron's own Muon
RECIPES = megatron_muon.MuonConfig(
    nesterov=True, matched_adamw_rms=1.0, ns_coefficients="quintic", ns_dtype="bf16"
)


First = Literal["plugin", "bridge"]


def _installed() -> bool:
    return (
        te_on_cpu.TE is not None
        and importlib.util.find_spec("megatron.bridge") is not None
    )


pytestmark = pytest.mark.skipif(
    not _installed(), reason="no Megatron-Bridge on the path"
)


# ------------------------------------------------------------------- on every rank


def _bridges_optim(first: First, settings: megatron_muon.MuonConfig | None) -> Any:
    """Its module of ``setup_optimizer``, imported before or after the plugin is
    installed.
    """
    sys.modules.pop(OPTIM, None)
    if first == "bridge":
        importlib.import_module(OPTIM)
    megatron_muon.install(settings)
    return importlib.import_module(OPTIM)


def _settings() -> dict[str, Any]:
    return {
        "optimizer": "muon",
        "lr": CASE.lr,
        "min_lr": 0.0,
        "weight_decay": CASE.weight_decay,
        "clip_grad": CASE.clip,
        "bf16": True,
        "params_dtype": CASE.dtype,
        "use_distributed_optimizer": True,
    }


def _recipes() -> Any:
    """The optimizer of its recipe for Kimi K2, with the line that a user adds."""
    import megatron.bridge
    from megatron.bridge.training import config as bridge

    # itself imports all, diffusion too
    recipes = types.ModuleType("megatron.bridge.recipes")
    recipes.__path__ = [f"{megatron.bridge.__path__[0]}/recipes"]
    sys.modules.setdefault(recipes.__name__, recipes)
    from megatron.bridge.recipes.kimi.h100.kimi_k2 import _apply_kimi_k2_optimizer

    cfg = types.SimpleNamespace(
        train=types.SimpleNamespace(train_iters=8), mixed_precision="bf16"
    )
    cfg.ddp = bridge.DistributedDataParallelConfig()
    _apply_kimi_k2_optimizer(cfg, "muon")
    cfg.ddp.use_distributed_optimizer = True
    bridge._validate_and_sync_distributed_optimizer_settings(cfg)
    for name in ("lr", "min_lr", "weight_decay", "clip_grad", "params_dtype"):
        setattr(cfg.optimizer, name, _settings()[name])
    return cfg.optimizer


def _through_bridge(built: Any, first: First, recipe: bool) -> tuple[Any, Any]:
    optim = _bridges_optim(first, None if recipe else SETTINGS)
    from megatron.bridge.training.config import OptimizerConfig, SchedulerConfig

    config = _recipes() if recipe else OptimizerConfig(**_settings())
    config.finalize()
    schedule = SchedulerConfig(
        lr_decay_style="cosine",
        start_weight_decay=0.1,
        end_weight_decay=0.2,
        weight_decay_incr_style="linear",
    )
    # ConfigContainer.validate() makes these of iterations and the batch size.
    schedule.lr_warmup_steps, schedule.lr_decay_steps, schedule.wd_incr_steps = 2, 6, 4
    return optim.setup_optimizer(config, schedule, built.chunks)


def _through_core(built: Any, recipe: bool) -> tuple[Any, Any]:
    megatron_muon.install(RECIPES if recipe else SETTINGS)
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = get_megatron_optimizer(OptimizerConfig(**_settings()), built.chunks)
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=CASE.lr,
        min_lr=0.0,
        lr_warmup_steps=2,
        lr_decay_steps=6,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.2,
        wd_incr_steps=4,
        wd_incr_style="linear",
    )
    return optimizer, schedule


def _trained(topology: Topology, first: First | None, recipe: bool) -> dict[str, Any]:
    built = build(CASE, topology)
    start = {name: param.detach().clone() for name, param in built.params.items()}
    try:
        built.optimizer, schedule = (
            _through_bridge(built, first, recipe)
            if first
            else _through_core(built, recipe)
        )
        schedule.step(1)  # as at the first, lr is 0
        for step in range(CASE.steps):
            groups = built.optimizer.param_groups
            rates = [(group["lr"], group["weight_decay"]) for group in groups]
            built.log.setdefault("rates", []).append(rates)
            write_grads(built, step)
            ok, norm, _ = built.optimizer.step()
            assert ok
            built.log.setdefault("norms", []).append(float(norm))
            built.optimizer.zero_grad()
            schedule.step(1)
    finally:
        megatron_muon.uninstall()
    built.log["still"] = [
        name for name, param in built.params.items() if param.equal(start[name])
    ]
    built.log["meter"] = megatron_muon.meter(built.optimizer)
    return held(built)


@pytest.mark.parametrize("topology", [ONE, DP2, TP2])
@pytest.mark.parametrize(
    "first, recipe", [("plugin", False), ("bridge", False), ("plugin", True)]
)
def test_its_setup_of_the_optimizer_is_megatrons_with_the_plugin(
    first: First, recipe: bool, topology: Topology
) -> None:
    """Also by its own recipe for Muon, and where Bridge had Megatron's functions by
    name before.
    """
    theirs = run(_trained, topology.world_size, topology, first, recipe, timeout=400)
    ours = run(_trained, topology.world_size, topology, None, recipe)
    assert differences(whole(ours), whole(theirs)) == []
    for one, other in zip(ours, theirs, strict=True):
        assert one["log"] == other["log"]
        assert other["log"]["still"] == [] and other["log"]["meter"].steps == CASE.steps
        assert (
            len({rate for rates in other["log"]["rates"] for rate in rates})
            > CASE.steps
        )


# ------------------------------------------------------------------- pretrain()


def _without_a_gpu(patches: Patches) -> None:
    """What Bridge's pretrain() asks of CUDA beyond megatron-core, and one absent
    package.
    """
    training.device(patches)
    training.memory(patches)
    resiliency = types.ModuleType("nvidia_resiliency_ext.inprocess")
    resiliency.CallWrapper = object  # in an annotation only
    sys.modules.setdefault(
        "nvidia_resiliency_ext", types.ModuleType("nvidia_resiliency_ext")
    )
    sys.modules.setdefault("nvidia_resiliency_ext.inprocess", resiliency)
    setup = importlib.import_module("megatron.bridge.training.setup")
    original = setup.initialize_megatron
    patches.set(
        setup,
        "initialize_megatron",
        lambda *args, **kwargs: original(*args, **{**kwargs, "allow_no_cuda": True}),
    )


def _model() -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core.transformer.enums import AttnBackend

    return GPTModelProvider(
        **{
            "num_layers": 2,
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "vocab_size": 128,
        },
        **{"num_attention_heads": 4, "num_query_groups": 2, "seq_length": 32},
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        attention_backend=AttnBackend.local,  # Transformer Engine's is not in the stub
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        # Each is a CUDA kernel.
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
    )


def _config(folder: Path, steps: int) -> Any:
    from megatron.bridge.training import config as bridge

    return bridge.ConfigContainer(
        model=_model(),
        train=bridge.TrainingConfig(
            train_iters=steps, global_batch_size=4, micro_batch_size=1
        ),
        validation=bridge.ValidationConfig(eval_iters=0),
        optimizer=bridge.OptimizerConfig(
            optimizer="muon",
            lr=0.02,
            min_lr=0.002,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        scheduler=bridge.SchedulerConfig(
            **{"lr_decay_style": "cosine", "lr_warmup_iters": 2, "lr_decay_iters": 8},
            **dict.fromkeys(("start_weight_decay", "end_weight_decay"), 0.1),
        ),
        ddp=bridge.DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        ),
        dataset=bridge.MockGPTDatasetConfig(
            random_seed=1234,
            seq_length=32,
            **dict.fromkeys(
                ("reset_attention_mask", "reset_position_ids", "eod_mask_loss"), False
            ),
            dataloader_type="single",
            num_workers=0,
            path_to_cache=str(folder / "data"),
        ),
        logger=bridge.LoggerConfig(log_interval=1),
        tokenizer=bridge.TokenizerConfig(
            tokenizer_type="NullTokenizer", vocab_size=127
        ),
        checkpoint=bridge.CheckpointConfig(ckpt_format="torch_dist", async_save=False),
        rng=bridge.RNGConfig(seed=1234),
        dist=bridge.DistributedInitConfig(distributed_backend="gloo"),
    )


def _pretrained(folder: Path, steps: int) -> dict[str, Any]:
    """Losses of the steps, and the meter after the last."""
    patches = Patches()
    record: dict[str, Any] = {"losses": []}

    def after_a_step(context: Any) -> None:
        record["losses"].append(float(context.loss_dict["lm loss"]))

    def after_the_last(context: Any) -> None:
        record["meter"] = megatron_muon.meter(context.optimizer)

    for name in ("FLASH", "FUSED", "UNFUSED"):  # Megatron sets these for each model
        os.environ.pop(f"NVTE_{name}_ATTN", None)
    try:
        _without_a_gpu(patches)
        megatron_muon.install(SETTINGS)
        from megatron.bridge.training.callbacks import CallbackManager
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain

        callbacks = CallbackManager()
        callbacks.register("on_train_step_end", after_a_step)
        callbacks.register("on_train_end", after_the_last)
        pretrain(_config(folder, steps), forward_step, callbacks)
    finally:
        megatron_muon.uninstall()
        patches.undo()
    return record


def test_pretrain_trains(tmp_path: Path) -> None:
    (record,) = run(_pretrained, 1, tmp_path, 8, timeout=400)
    assert record["meter"].steps == 8
    assert record["losses"][-1] < record["losses"][0] - 0.1
