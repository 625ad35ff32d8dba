"""``pretrain_gpt.py`` in which a momentum is infinite from step 2 on, on the ranks that
have it.

Run by the launcher, with the checkout on PYTHONPATH.
"""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from typing import Any

import megatron.training
import torch

from megatron_muon.mcore.host.shards import owned_shards
from megatron_muon.mcore.wiring.chained_optimizer import MuonChainedOptimizer

original = MuonChainedOptimizer.step_with_ready_grads
numbers = itertools.count(1)


def step(self: Any) -> Any:
    if next(numbers) == 2:
        for part in self.chained_optimizers:
            (chunk,) = part.model_chunks
            names = {id(param): name for name, param in chunk.named_parameters()}
            for param, shard in owned_shards(part):
                if names[id(param)].endswith("layers.0.mlp.linear_fc2.weight"):
                    part.optimizer.state[shard]["exp_avg"][0] = torch.inf
    return original(self)


MuonChainedOptimizer.step_with_ready_grads = step
checkout = Path(str(megatron.training.__file__)).parents[2]
runpy.run_path(str(checkout / "pretrain_gpt.py"), run_name="__main__")
