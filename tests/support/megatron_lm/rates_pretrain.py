"""``pretrain_gpt.py`` that prints the rates and weight decays of the first step's
parameters.

Run by the launcher, with the checkout on PYTHONPATH.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import megatron.core.optimizer.optimizer as optimizers
import megatron.training

original = optimizers.ChainedOptimizer.step


def step(self: Any) -> Any:
    groups = [group for group in self.param_groups if group["params"]]
    used = {(float(group["lr"]), float(group["weight_decay"])) for group in groups}
    print(
        "first step:",
        "; ".join(f"{lr:.6g} and {decay:.6g}" for lr, decay in used),
        flush=True,
    )
    optimizers.ChainedOptimizer.step = original
    return original(self)


optimizers.ChainedOptimizer.step = step
checkout = Path(str(megatron.training.__file__)).parents[2]
runpy.run_path(str(checkout / "pretrain_gpt.py"), run_name="__main__")
