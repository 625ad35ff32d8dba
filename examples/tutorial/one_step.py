"""One optimizer step of a small GPT on ranks of this machine, with every number kept.

``take_step`` starts one process for each rank. Each builds the quickstart's model in
Megatron's DDP and DistributedOptimizer, runs forward and backward on its own text, and
takes one step with Muon. What it returns are arrays and integers: the notebook beside
this file prints them.
"""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

QUICKSTART = Path(__file__).resolve().parent.parent / "quickstart"
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"  # the same on every machine
SHAPE = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 "
    "--seq-length 32 --swiglu --disable-bias-linear --bf16 --use-distributed-optimizer "
    "--micro-batch-size 2 --optimizer muon --lr 0.01 --weight-decay 0.1 --clip-grad 0.5"
).split()


@dataclass
class Sent:
    """Elements of one matrix that travel to its home; their directions come back the
    same way.
    """

    matrix: str
    source: int
    home: int
    elements: int
    bytes: int


@dataclass
class RankStep:
    """What one rank held before, during and after the step.

    Attributes:
        shard: for each parameter with a slice on it: (first, last + 1) of its elements.
        sizes: elements of each parameter of the model on this rank.
        whose: for each parameter of ``shard``: "Muon" or "AdamW".
        grads: its own gradient of each parameter before the reduction, fp32.
        reduced: its slice of the reduced and clipped gradients.
        before, after: its slice of the fp32 main parameters.
        momentum: its slice of the momentum, after the step.
        weights: the model's bf16 parameters after the step.
        staged: the matrices whose home it is, before Newton-Schulz.
        directions: the same after it.
        sent: what it sends to other ranks' homes.
        homes: for each matrix of the stage its rank, (rows, columns) and flops.
        grad_norm: Megatron's, over all ranks.
    """

    shard: dict[str, tuple[int, int]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    whose: dict[str, str] = field(default_factory=dict)
    grads: dict[str, np.ndarray] = field(default_factory=dict)
    reduced: dict[str, np.ndarray] = field(default_factory=dict)
    before: dict[str, np.ndarray] = field(default_factory=dict)
    after: dict[str, np.ndarray] = field(default_factory=dict)
    momentum: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    staged: dict[str, np.ndarray] = field(default_factory=dict)
    directions: dict[str, np.ndarray] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    homes: dict[str, tuple[int, tuple[int, int], int]] = field(default_factory=dict)
    grad_norm: float = 0.0


def take_step(tp: int = 1, dp: int = 4) -> list[RankStep]:
    """The step on ``tp * dp`` ranks, one process each; of each rank what it held."""
    from megatron_muon.lab.ranks import Task, run_ranks

    task = Task(
        run=_on_rank,
        argument=tp,
        world=tp * dp,
        gpus=False,
        threads=1,
        seconds=120.0,
        builds=True,
    )
    return run_ranks(task)


class _Watcher:
    """Keeps the matrices of the round as they come to their home and as they leave
    it.
    """

    def __init__(self, names: list[str], step: RankStep) -> None:
        self.names, self.step = names, step
        self.memory: Any = None

    def before_home(self, staged: Any) -> None:
        self.memory = staged.stacks, staged.elements
        self._keep(self.step.staged)

    def before_update(self, table: Any, shards: Any, directions: Any) -> None:
        self._keep(self.step.directions)  # they are where the matrices were

    def _keep(self, into: dict[str, np.ndarray]) -> None:
        stacks, elements = self.memory
        for stack in stacks:
            layout = stack.layout
            for number, index in enumerate(stack.matrices):
                start = stack.start + number * layout.numel
                flat = elements[start : start + layout.numel].float()
                # a weight that TP cuts by columns is staged one rank's columns after
                # the other's
                parts = flat.view(layout.column_parts, layout.rows, -1)
                into[self.names[index]] = torch.cat(list(parts), dim=1).numpy()


def _on_rank(tp: int) -> RankStep:
    """The step on this rank; torch's world is up."""
    with contextlib.redirect_stdout(io.StringIO()):  # what the plugin says of the plan
        return _built(tp)


def _built(tp: int) -> RankStep:
    sys.path.insert(0, str(QUICKSTART))
    import train  # the quickstart's
    from arguments import parse
    from corpus import Corpus
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from model import build_model

    dp = torch.distributed.get_world_size() // tp
    sizes = [
        "--tensor-model-parallel-size",
        str(tp),
        "--global-batch-size",
        str(2 * dp),
    ]
    args = parse([*SHAPE, *sizes, "--seed", "1"])
    parallel_state.initialize_model_parallel(tp)
    model_parallel_cuda_manual_seed(args.seed)
    model = build_model(args)
    optimizer, _ = train.build_optimizer(args, model)
    for group in optimizer.param_groups:
        group["lr"] = args.lr  # the schedule would begin at 0
    text = np.frombuffer(TEXT.read_bytes(), np.uint8)
    data, _ = train.batches(args, Corpus(text, text, 1, 1, ""))
    return _step(args, model, optimizer, data, train.run_step)


def _step(args: Any, model: Any, optimizer: Any, data: Any, run_step: Any) -> RankStep:
    from megatron_muon.mcore.host.shards import owned_shards

    (part,) = optimizer.chained_optimizers
    step = _planned(part)
    names = {param: _short(name) for name, param in model.named_parameters()}
    model.zero_grad_buffer()
    optimizer.zero_grad()
    model.config.no_sync_func = None
    model.ddp_config.overlap_grad_reduce = False
    finish, model.finish_grad_sync = (
        model.finish_grad_sync,
        lambda *args, **kwargs: None,
    )
    run_step(data, 1, model, torch.device("cpu"), True)
    step.grads = {names[param]: _kept(param.main_grad) for param in names}
    model.finish_grad_sync = finish
    model.finish_grad_sync()
    owned = [(names[param], param, shard) for param, shard in owned_shards(part)]
    step.before = {name: _kept(shard) for name, _, shard in owned}
    step.sizes = {name: param.numel() for param, name in names.items()}
    for name, param, shard in owned:
        held = part._get_model_param_range_map(param)["param"]
        step.shard[name] = (held.start, held.end)
        step.whose[name] = "Muon" if part.muon.owns(shard) else "AdamW"
    part.muon.observe(_Watcher(list(step.homes), step))
    _, step.grad_norm, _ = optimizer.step()
    for name, _, shard in owned:
        step.after[name] = _kept(shard)
        step.reduced[name] = _kept(shard.grad)
        if step.whose[name] == "Muon":
            step.momentum[name] = _kept(part.optimizer.state[shard]["exp_avg"])
    step.weights = {name: _kept(param) for param, name in names.items()}
    return step


def _planned(part: Any) -> RankStep:
    """What the plan says before anything is computed."""
    plan, rank = part.muon.plan, part.stage_group.rank()
    step = RankStep()
    for matrix, flops in zip(plan.matrices, plan.flops, strict=True):
        step.homes[_short(matrix.name)] = (
            matrix.home,
            (matrix.rows, matrix.cols),
            flops,
        )
    for segment in plan.slices:
        matrix = plan.matrices[segment.matrix]
        if segment.rank == rank != matrix.home and not segment.replica:
            count = segment.elements.size
            name = _short(matrix.name)
            step.sent.append(
                Sent(name, rank, matrix.home, count, count * plan.itemsize)
            )
    return step


def _kept(tensor: torch.Tensor) -> np.ndarray:
    """A copy in fp32, which a pipe carries as it is."""
    return tensor.detach().float().numpy().copy()


def _short(name: str) -> str:
    """``layers.0.mlp.linear_fc1`` for
    ``module.module.decoder.layers.0.mlp.linear_fc1.weight``.
    """
    return name.replace("module.", "").replace("decoder.", "").replace(".weight", "")
