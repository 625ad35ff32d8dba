"""NeMo 2's own Python over the plugin: its optimizer module, and its Trainer.

Where PYTHONPATH has a clone of NVIDIA-NeMo/NeMo that has ``nemo/lightning`` and the packages that
it imports. ``nemo.collections.llm`` is left out: torch.jit meets the CPU runtime's functions there.
``llm.train`` is ``trainer.fit``, which is run here over a GPT of Megatron's.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_muon
from megatron_muon.cpu import training
from megatron_muon.runtime.patches import Patches
from support.models.gpt import (
    GROUPS,
    HEADS,
    HIDDEN,
    SEQUENCE,
    VOCAB,
    Case,
    Topology,
    build,
    held,
    inner_optimizers,
    write_grads,
)
from support.ranks import run
from support.runs.whole import differences, whole

CASE = Case(steps=4)
SETTINGS = megatron_muon.MuonConfig(**dict(CASE.muon))
STEPS = 8


def _reason() -> str | None:
    if importlib.util.find_spec("nemo") is None or importlib.util.find_spec("lightning") is None:
        return "no NeMo on the path"
    from megatron.core.optimizer import get_megatron_optimizer

    if "lr_mult" not in inspect.signature(get_megatron_optimizer).parameters:
        return "NeMo 2 gives get_megatron_optimizer lr_mult, which core 0.15 and earlier take"
    return None


pytestmark = pytest.mark.skipif(_reason() is not None, reason=str(_reason()))


def _config(bf16: bool = True) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        optimizer="muon",
        lr=CASE.lr,
        weight_decay=CASE.weight_decay,
        clip_grad=CASE.clip,
        bf16=bf16,
        params_dtype=CASE.dtype if bf16 else torch.float32,
        use_distributed_optimizer=True,
    )


def _module(steps: int, bf16: bool = True, **conditions: Any) -> Any:
    from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule

    schedule = CosineAnnealingScheduler(
        max_steps=steps, warmup_steps=2, constant_steps=0, min_lr=0.002
    )
    return MegatronOptimizerModule(_config(bf16), schedule, **conditions)


# ------------------------------------------------------------------- its optimizer module


def _faster(name: str, param: torch.nn.Parameter) -> bool:
    return "linear_fc1" in name


class _Holder(torch.nn.Module):
    """A chunk as NeMo has it: a Lightning module around Megatron's DDP."""

    def __init__(self, ddp: torch.nn.Module) -> None:
        super().__init__()
        self.module = ddp


class _Trainer:
    """Of Lightning's, what an optimizer module asks for."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []


def _through_nemo(built: Any) -> tuple[Any, Any]:
    from nemo.lightning.megatron_parallel import MegatronParallel

    model = MegatronParallel(
        [_Holder(chunk) for chunk in built.chunks], ddp_config=built.ddp.ddp_config, cpu=True
    )
    model.trainer = _Trainer()
    module = _module(CASE.steps + 2, scale_lr_cond=_faster, lr_mult=3.0)
    configured = module(None, megatron_parallel=model)
    assert configured["optimizer"].mcore_optimizer is not None
    return configured["optimizer"], configured["lr_scheduler"]["scheduler"]


def _through_core(built: Any) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer

    return get_megatron_optimizer(_config(), built.chunks, scale_lr_cond=_faster, lr_mult=3.0)


def _stepped(topology: Topology, rates: list[Any] | None) -> dict[str, Any]:
    """Through NeMo, whose rates are written down; or through Megatron's factory, given these."""
    built = build(CASE, topology)
    megatron_muon.install(SETTINGS)
    try:
        if rates is None:
            theirs, schedule = _through_nemo(built)
            built.optimizer = theirs.mcore_optimizer
        else:
            theirs = built.optimizer = _through_core(built)
    finally:
        megatron_muon.uninstall()
    for step in range(CASE.steps):
        groups = [
            group for inner in inner_optimizers(built.optimizer) for group in inner.param_groups
        ]
        if rates is not None:
            for group, (lr, decay) in zip(groups, rates[step], strict=True):
                group["lr"], group["weight_decay"] = lr, decay
        now = [(group["lr"], group["weight_decay"]) for group in groups]
        built.log.setdefault("rates", []).append(now)
        write_grads(built, step)
        _, norm, _ = theirs.step()  # NeMo's has a loss where Megatron's has success
        built.log.setdefault("norms", []).append(float(norm))
        theirs.zero_grad()
        if rates is None:
            schedule.step()
    built.log["meter"] = megatron_muon.meter(built.optimizer)
    return held(built)


@pytest.mark.parametrize("world_size", [1, 2])
def test_its_optimizer_module_steps_as_megatrons_factory_does(world_size: int) -> None:
    topology = Topology(dp=world_size)
    theirs = run(_stepped, world_size, topology, None, timeout=400)
    rates = theirs[0]["log"]["rates"]
    ours = run(_stepped, world_size, topology, rates)
    assert differences(whole(ours), whole(theirs)) == []
    assert [one["log"] for one in ours] == [one["log"] for one in theirs]
    assert theirs[0]["log"]["meter"].steps == CASE.steps
    lrs, decays = zip(*(rate for step in rates for rate in step), strict=True)
    assert len(set(lrs)) == 2 * CASE.steps  # the schedule moves both rates
    assert set(decays) == {0.0, CASE.weight_decay}


# ------------------------------------------------------------------- its Trainer


def _lightning_model(optim: Any) -> Any:
    """A GPT of Megatron's as NeMo's GPTModel has one, whose module cannot be imported here."""
    import lightning.pytorch as pl
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from nemo.lightning.megatron_parallel import MaskedTokenLossReduction

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.config = TransformerConfig(
                num_layers=2,
                hidden_size=HIDDEN,
                num_attention_heads=HEADS,
                num_query_groups=GROUPS,
                attention_dropout=0.0,
                hidden_dropout=0.0,
                use_cpu_initialization=True,
                add_bias_linear=False,
            )
            optim.connect(self)

        def configure_model(self, vp_stage: int | None = None) -> None:
            if not hasattr(self, "module"):
                self.module = GPTModel(
                    self.config,
                    get_gpt_layer_local_spec(),
                    VOCAB,
                    SEQUENCE,
                    share_embeddings_and_output_weights=False,
                )

        def data_step(self, dataloader_iter: Any) -> dict[str, torch.Tensor]:
            batch = next(dataloader_iter)
            return batch[0] if isinstance(batch, tuple) else batch

        def forward_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self(batch)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            tokens = batch["tokens"]
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
            causal = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()[None, None]
            return self.module(tokens, positions, causal, labels=batch["labels"])

        def training_step(self, batch: Any, batch_idx: int | None = None) -> torch.Tensor:
            return self.forward_step(batch)

        @property
        def training_loss_reduction(self) -> Any:
            return MaskedTokenLossReduction()

    return Model()


class _Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Each next token is the last one plus one."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + SEQUENCE + 1) % VOCAB
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(SEQUENCE),
        }


def _without_llm() -> None:
    """A stand-in of what a forward pass asks of ``nemo.collections.llm``: no distillation."""
    name = ""
    for part in ("nemo", "collections", "llm", "modelopt", "distill", "utils"):
        name = f"{name}.{part}".lstrip(".")
        if name.startswith("nemo.collections.llm"):
            sys.modules[name] = types.ModuleType(name)
    no_distillation = sys.modules[name]
    no_distillation.get_tensor_shapes_adjust_fn_for_distillation = lambda *args: None


def _fitted(folder: Path) -> dict[str, Any]:
    patches = Patches()
    try:
        training.device(patches)
        training.memory(patches)
        _without_llm()
        return _fit(folder)
    finally:
        megatron_muon.uninstall()
        patches.undo()


def _fit(folder: Path) -> dict[str, Any]:
    import lightning.pytorch as pl
    from nemo import lightning as nl

    seen: dict[str, Any] = {"losses": [], "rates": []}

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen["losses"].append(float(trainer.callback_metrics["reduced_train_loss"]))
            seen["rates"].append(trainer.optimizers[0].param_groups[0]["lr"])

    torch.distributed.destroy_process_group()  # it makes its own, and Megatron's groups with it
    megatron_muon.install(SETTINGS)
    model = _lightning_model(_module(STEPS, bf16=False))
    data = torch.utils.data.DataLoader(_Counting(), batch_size=1)
    strategy = nl.MegatronStrategy(
        process_group_backend="gloo",
        data_sampler=nl.MegatronDataSampler(SEQUENCE, micro_batch_size=2, global_batch_size=4),
        ddp=_ddp(),
    )
    trainer = nl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=STEPS,
        default_root_dir=str(folder),
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    trainer.fit(model, data)
    seen["meter"] = megatron_muon.meter(trainer.optimizers[0].mcore_optimizer)
    return seen


def _ddp() -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )


def test_its_trainer_trains(tmp_path: Path) -> None:
    (seen,) = run(_fitted, 1, tmp_path, timeout=400)
    assert seen["meter"].steps == STEPS
    assert seen["losses"][-1] < seen["losses"][0] - 0.1
    assert len(set(seen["rates"])) > STEPS // 2
