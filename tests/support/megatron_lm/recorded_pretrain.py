"""A script that writes down what its optimizer gets and makes, for one process.

Run by the launcher, with the checkout on PYTHONPATH, the script's name in SCRIPT and
the file to write in RECORD.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import megatron.core.optimizer.optimizer as optimizers
import megatron.training
import torch
from torch import Tensor

NAMES = ("lr", "weight_decay", "wd_mult")
recorded: dict[str, Any] = {"steps": []}
original = optimizers.ChainedOptimizer.step


def weights(optimizer: Any) -> dict[str, Tensor]:
    """By name, the fp32 parameters of the model, which are the main ones too."""
    (chunk,) = optimizer.chained_optimizers[
        0
    ].model_chunks  # experts have one of their own
    return {
        name.removeprefix("module.module."): p for name, p in chunk.named_parameters()
    }


def step(self: Any) -> Any:
    before = weights(self)
    if not recorded["steps"]:
        recorded["weights"] = {name: p.detach().clone() for name, p in before.items()}
    grads = {name: p.main_grad.detach().clone() for name, p in before.items()}
    groups = [{key: group[key] for key in NAMES} for group in self.param_groups]
    result = original(self)
    recorded["steps"].append(
        {"grads": grads, "groups": groups, "norm": float(result[1])}
    )
    recorded["final"] = {name: p.detach().clone() for name, p in weights(self).items()}
    torch.save(recorded, os.environ["RECORD"])
    return result


optimizers.ChainedOptimizer.step = step
checkout = Path(str(megatron.training.__file__)).parents[2]
runpy.run_path(str(checkout / os.environ["SCRIPT"]), run_name="__main__")
