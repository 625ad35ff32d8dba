"""Logging steps of a chain of optimizers: what is observed, added up once, and written
to Megatron's writers and the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_muon.console import say
from megatron_muon.mcore.host.loop import host
from megatron_muon.mcore.host.process_groups import Chunks, Stage
from megatron_muon.mcore.host.shards import owned_shards
from megatron_muon.mcore.routing.param_routing import layers, weights
from megatron_muon.mcore.watching.forward import (
    LayerOutputs,
    clip_threshold,
    kept_logits,
)
from megatron_muon.mcore.watching.numbers import (
    StepNumbers,
    ranges,
    scalars,
    step_numbers,
)
from megatron_muon.mcore.watching.observer import MatrixObserver
from megatron_muon.mcore.watching.rows import Message, Table, dot, muon_rows, row_name
from megatron_muon.mcore.watching.warnings import Warnings
from megatron_muon.runtime import collectives
from megatron_muon.runtime.collectives import Group
from megatron_muon.runtime.consensus import attempt, together
from megatron_muon.runtime.states import MAIN_KEY
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.rules import row_of


class Watch:
    """The logging steps of one chain, on one rank. Every rank of the group makes one.

    The group's ranks step together; None is the world. Its last rank writes, as in
    Megatron.
    """

    def __init__(
        self,
        dist_opts: Sequence[Any],
        model_chunks: Chunks,
        config: MuonConfig,
        stage: Stage,
        group: Group | None,
    ) -> None:
        assert config.log_interval is not None
        self._dist_opts = dist_opts
        self._group = group
        self._stage = stage
        self._interval = config.log_interval
        self._steps = 0
        self._rows = {
            weight.param: row_name(weight.name) for weight in weights(model_chunks)
        }
        self._layers = list(layers(model_chunks))
        self._outputs = LayerOutputs(self._layers)
        self._outputs.expect(True)  # the number of the first step is not known yet
        self._logits = list(kept_logits(model_chunks, config))
        own = together(self._rows_of_stage, group, stage.device)
        ranks = collectives.all_gather_json(own, group)
        adapts = row_of(config.rule).adapts
        self._table = Table(list(filter(None, ranks)), adapts=adapts)
        self._writes = dist.get_rank(group) == dist.get_world_size(group) - 1
        threshold = clip_threshold(model_chunks, config)
        self._warnings = Warnings(threshold, self._table.about)
        # of the last step: the sums, and the largest logits, over all ranks
        self._sums: tuple[Tensor, Tensor] | None = None

    def _rows_of_stage(self) -> dict[str, Any]:
        """The rows of a stage, which its first rank sends to all others; else empty."""
        if not self._stage.speaks:
            return {}
        routes = self._dist_opts[0].routes
        adamws = {row_name(route.weight.name) for route in routes if route.muon is None}
        plans = [part.muon.plan for part in self._dist_opts]
        matrices = chain.from_iterable(plan.matrices for plan in plans)
        return {
            "muon": muon_rows(matrices, self._dist_opts[0].muon.numerics),
            "adamw": sorted(adamws),
            "layers": [name for name, _ in self._layers],
            "logits": list(chain.from_iterable(one.rows for one in self._logits)),
        }

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of the chain; every rank of the group enters it."""
        number = self._number()
        self._steps += 1
        self._sums = None
        try:
            message = self._observed() if number % self._interval == 0 else None
            yield
            if message is not None:
                self._log(message, number)
        except BaseException:
            self._outputs.expect(True)  # the number of the next step is not known
            raise
        finally:
            for part in self._dist_opts:
                part.muon.observe(None)
        self._outputs.expect((number + 1) % self._interval == 0)

    def numbers(self) -> dict[str, float]:
        """The last step's numbers by TensorBoard's names; empty if it did not log.

        A GPU's sums are waited for.
        """
        return scalars(self._step_numbers())

    def skip(self) -> None:
        """A step is skipped: forget its forward passes. It has a number only if the
        loop numbers the steps.
        """
        self._sums = None
        following = self._number() + (host().step() is not None)
        self._outputs.expect(following % self._interval == 0)

    def _number(self) -> int:
        """The number of the step under way."""
        number = host().step()
        return self._steps + 1 if number is None else number

    def _observed(self) -> Message:
        """The sums of a logging step; Muon's observers add to them during the step."""
        message = Message(self._table, self._stage.device)
        self._outputs.add_to(message)
        for part in self._dist_opts:
            muon = part.muon
            for param, shard in owned_shards(part):
                if not muon.owns(shard):
                    grad = part.states.grad(shard)  # checked before the step
                    weight = part.states.get(shard, MAIN_KEY)
                    message.add(
                        "adamw",
                        self._rows[param],
                        elements=shard.numel(),
                        weight_squares=dot(weight, weight),
                        gradient_squares=dot(grad, grad),
                    )
            muon.observe(MatrixObserver(muon, message))
        return message

    def _log(self, message: Message, number: int) -> None:
        total = message.total()
        collectives.add_up("muon/watch", total, self._group)
        self._sums = total, self._largest_logits()
        if self._writes:
            _, error = attempt(lambda: self._write(number))
            if error is not None:  # a full disk does not stop a run
                text = f"{type(error).__name__}: {error}"
                say(f"[megatron_muon] step {number} is not logged: {text}")

    def _largest_logits(self) -> Tensor:
        """The largest logit of each row over all ranks; -inf where an attention did not
        run.
        """
        names = self._table.names["logits"]
        maxima = torch.full((len(names),), -torch.inf, device=self._stage.device)
        for attention in self._logits:
            first = names.index(attention.rows[0])
            rows = maxima[first : first + len(attention.rows)]
            attention.put_into(rows, self._stage.tp)
        if names:
            collectives.max_over("muon/watch", maxima, self._group)
        return maxima

    def _step_numbers(self) -> StepNumbers:
        if self._sums is None:
            return {}
        totals, maxima = self._sums
        return step_numbers(self._table, totals.tolist(), maxima.tolist())

    def _write(self, number: int) -> None:
        numbers = self._step_numbers()
        say(f"[megatron_muon] step {number}: {ranges(numbers)}")
        for text in self._warnings.of(number, numbers):
            say(f"[megatron_muon] step {number}: warning: {text}")
        host().write(number, scalars(numbers))
