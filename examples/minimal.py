"""Distributed Muon in a script of one's own: a small GPT learns to count, on GPUs or
CPUs.

``python examples/minimal.py`` takes one process, ``torchrun --nproc-per-node 2`` before
it two. A folder behind it gets a checkpoint.
"""
# ruff: noqa: E402 (install() has to run before Megatron is imported)

import importlib.util
import os
import sys
import warnings

needed = ("numpy", "packaging", "psutil")  # without psutil a save hangs
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"Megatron needs more packages: pip install {' '.join(missing)}")
# what is not installed, or has another name in a later torch, does not matter here
warnings.filterwarnings("ignore", module=r"megatron\.|torch")

import torch

import megatron_muon

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    megatron_muon.cpu.enable()  # before Megatron is imported
megatron_muon.install()

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig


def main(folder: str | None = None) -> None:
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    os.environ.update(
        {name: os.environ.get(name, value) for name, value in alone.items()}
    )
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if ON_GPU else "cpu"
    )
    if ON_GPU:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if ON_GPU else "gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)

    shape = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    gpt = GPTModel(
        shape, get_gpt_layer_local_spec(), vocab_size=256, max_sequence_length=32
    )
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(shape, sharded, gpt.to(device))
    settings = OptimizerConfig(
        optimizer="muon", use_distributed_optimizer=True, lr=2e-3, min_lr=1e-3
    )
    optimizer = get_megatron_optimizer(settings, [model])
    # lr, then decay: without it norms' gammas decay, too
    rates, decays = (0.0, 2e-3, 1e-3, 2, 20, "cosine"), (0.1, 0.1, 20, "constant")
    scheduler = OptimizerParamScheduler(optimizer, *rates, *decays)

    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)  # its own tokens
    positions = torch.arange(32, device=device).expand(8, 32)
    for step in range(20):
        tokens = (torch.randint(256, (8, 1), device=device) + positions) % 256
        model.zero_grad_buffer()
        loss = model(tokens, positions, None, labels=(tokens + 1) % 256).mean()
        loss.backward()
        model.finish_grad_sync()  # averages the gradients over the ranks
        optimizer.step()
        scheduler.step(increment=1)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if rank == 0:
        print("A guess among 256 tokens has a loss of 5.545; below 4.5 it has learned.")
    if folder:
        os.makedirs(folder, exist_ok=True)
        state = {"model": gpt.sharded_state_dict()}
        state["optimizer"] = optimizer.sharded_state_dict(state["model"])
        # starts a process that imports this file
        dist_checkpointing.save(state, folder)
        if rank == 0:
            print(f"The checkpoint is in {os.path.abspath(folder)}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:2])
