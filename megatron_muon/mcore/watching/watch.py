"""Logging steps of a chain of optimizers: what is observed, added up once, and written."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.console import say
from megatron_muon.mcore.routing.param_routing import layers, weights
from megatron_muon.mcore.routing.survey import share_of
from megatron_muon.mcore.watching.host import host
from megatron_muon.mcore.watching.layer_outputs import LayerOutputs
from megatron_muon.mcore.watching.lines import Lines
from megatron_muon.mcore.watching.logits import clip_threshold, kept_logits
from megatron_muon.mcore.watching.observer import MatrixObserver
from megatron_muon.mcore.watching.record import scalars, start_record, step_record
from megatron_muon.mcore.watching.rows import (
    PLACE,
    RecordRow,
    StageRows,
    Table,
    muon_rows,
    row_name,
)
from megatron_muon.mcore.watching.sums import StepSums, dot
from megatron_muon.mcore.watching.warnings import Warnings
from megatron_muon.mcore.wiring.buffers.shards import owned_shards
from megatron_muon.mcore.wiring.process_groups import Stage
from megatron_muon.runtime import collectives
from megatron_muon.runtime.collectives import Group
from megatron_muon.runtime.consensus import attempt, together
from megatron_muon.runtime.optimizer import DistributedMuon
from megatron_muon.settings.config import MuonConfig, named
from megatron_muon.version import __version__

Muons = Sequence[tuple[Any, DistributedMuon]]

_ADAMW = PLACE["adamw"]


class Watch:
    """The logging steps of one chain, on one rank. Every rank of the group makes one.

    Args:
        muons: each optimizer that is no stub, with its Muon.
        model_chunks: this rank's.
        config: the settings, with a ``log_interval``.
        stage: this rank's.
        group: the ranks that step together; None for the world. Its last rank writes, as in
            Megatron.

    Raises:
        OSError: the file cannot be written; on the rank that writes.
        RuntimeError: likewise, on the others.
    """

    def __init__(
        self,
        muons: Muons,
        model_chunks: Sequence[Any],
        config: MuonConfig,
        stage: Stage,
        group: Group | None,
    ) -> None:
        assert config.log_interval is not None and config.log_file is not None
        self._group, self._device, self._interval = group, stage.device, config.log_interval
        self._steps = 0
        self._table = _table(muons, model_chunks, config, stage, group)
        self._muons = [muon for _, muon in muons]
        self._observers = [MatrixObserver(muon, self._table) for muon in self._muons]
        names = {weight.param: row_name(weight.name) for weight in weights(model_chunks)}
        self._adamws = [
            (shard, self._table.starts["adamw", names[param]])
            for part, muon in muons
            for param, shard in owned_shards(part)
            if not muon.owns(shard)
        ]
        self._first = muons[0][0]  # its groups are new objects after each load
        self._outputs = LayerOutputs(list(layers(model_chunks)), self._table)
        self._logits = list(kept_logits(model_chunks, config.qk_clip is not None))
        self._threshold = clip_threshold(model_chunks, config.qk_clip)
        self._tp = stage.tp
        self._outputs.attach()  # the number of the first step is not known yet
        self._rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._writes = self._rank == size - 1
        path = config.log_file
        self._lines = together(lambda: _lines(path) if self._writes else None, group, stage.device)
        self._warnings: Warnings | None = None  # from the first record on

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of the chain; every rank of the group enters it."""
        number = self._number()
        self._steps += 1
        if number % self._interval == 0:
            message = StepSums(self._table.size, self._device)
            self._before(message)
            try:
                yield
            finally:
                for muon in self._muons:
                    muon.observe(None)
            self._after(message, number)
        else:
            yield
        self._expect(number + 1)

    def skip(self) -> None:
        """A step is skipped: forget its forward passes. Only a loop's own numbers count it."""
        number = self._number()
        self._expect(number + 1 if host().step() is not None else number)

    def _number(self) -> int:
        """The number of the step under way."""
        given = host().step()
        return self._steps + 1 if given is None else given

    def _expect(self, number: int) -> None:
        """Observe the forward passes of this step, which comes next, if it is a logging step."""
        if number % self._interval == 0:
            self._outputs.attach()
        else:
            self._outputs.detach()

    def _before(self, message: StepSums) -> None:
        self._outputs.add_to(message)
        for shard, start in self._adamws:
            message.add(start + _ADAMW["elements"], float(shard.numel()))
            message.add(start + _ADAMW["weight_squares"], dot(shard, shard))
            grad = shard.grad
            assert grad is not None  # checked before the step
            message.add(start + _ADAMW["gradient_squares"], dot(grad, grad))
        for muon, observer in zip(self._muons, self._observers, strict=True):
            observer.message = message
            observer.observe_weights()
            muon.observe(observer)

    def _after(self, message: StepSums, number: int) -> None:
        milliseconds = sum(observer.milliseconds() for observer in self._observers)
        message.add(self._table.times + self._rank, milliseconds)
        total = message.total()
        collectives.add_up("muon/watch", total, self._group)
        maxima = self._largest_logits()
        if self._writes:
            _, error = attempt(lambda: self._write(total.tolist(), maxima.tolist(), number))
            if error is not None:  # a full disk does not stop a run
                text = f"{type(error).__name__}: {error}"
                say(f"[megatron_muon] step {number} is not logged: {text}")

    def _largest_logits(self) -> torch.Tensor:
        """The largest over all ranks, one for each row; -inf where an attention did not run."""
        places = self._table.logits
        maxima = torch.full((len(places),), -torch.inf, device=self._device)
        for attention in self._logits:
            start = places[attention.rows()[0]]
            attention.put_into(maxima[start : start + attention.groups], self._tp)
        if places:
            collectives.max_over("muon/watch", maxima, self._group)
        return maxima

    def _write(self, totals: Sequence[float], maxima: Sequence[float], number: int) -> None:
        lines, now = self._lines, time.time()
        assert lines is not None
        if self._warnings is None:
            start = start_record(
                self._table,
                version=__version__,
                interval=self._interval,
                time=now,
                logit_threshold=self._threshold,
            )
            self._warnings = Warnings(start)
            lines.append(start)
        groups = self._first.optimizer.param_groups
        lr = float(groups[0]["lr"]) if groups else None
        record = step_record(self._table, totals, maxima, step=number, time=now, lr=lr)
        lines.append(record)
        for text in self._warnings.of(record):
            say(f"[megatron_muon] step {number}: warning: {text}")
        host().write(number, dict(scalars(record)))


def _lines(path: str) -> Lines:
    try:
        return Lines(path)
    except OSError as error:
        raise OSError(
            f"{named('log_file')} {path}: {error}: give a path that the last rank can write"
        ) from error


def _table(
    muons: Muons,
    model_chunks: Sequence[Any],
    config: MuonConfig,
    stage: Stage,
    group: Group | None,
) -> Table:
    """The rows of all stages: the first rank of each stage tells the others."""

    def own() -> str:
        return _part(muons, model_chunks, config, stage).text() if stage.speaks else ""

    mine = together(own, group, stage.device)
    texts = collectives.all_gather_texts(mine, group)
    return Table([StageRows.of_text(text) for text in texts if text], len(texts))


def _part(muons: Muons, model_chunks: Sequence[Any], config: MuonConfig, stage: Stage) -> StageRows:
    matrices = [matrix for _, muon in muons for matrix in muon.plan.matrices]
    routes = muons[0][0].routes
    adamws = {row_name(route.weight.name) for route in routes if route.muon is None}
    kept = kept_logits(model_chunks, config.qk_clip is not None)
    rows = [
        *muon_rows(matrices, config),
        *(RecordRow("adamw", name) for name in sorted(adamws)),
        *(RecordRow("layers", name) for name, _ in layers(model_chunks)),
        *(RecordRow("logits", name) for each in kept for name in each.rows()),
    ]
    share = share_of(routes, config)
    work = [sum(flops) for flops in zip(*(muon.plan.ns_flops() for _, muon in muons), strict=True)]
    size = stage.group.size()
    return StageRows(tuple(rows), share.muon, share.total, sum(work), max(work, default=0), size)
