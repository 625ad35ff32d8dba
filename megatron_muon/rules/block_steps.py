"""Full steps, and block steps between them, which orthogonalize each TP rank's slice of
a matrix by itself (``full_period``).

Block-periodic orthogonalization (arXiv 2510.16981): no gather over TP, and less work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.layout import SLICE_OF, Block, Matrix, Parameter
from megatron_muon.planning.plan import ExchangePlan, make_plans
from megatron_muon.rules.muon import DistributedMuon
from megatron_muon.runtime import collectives
from megatron_muon.runtime.engine import Engine, ParamGroups
from megatron_muon.runtime.states import States
from megatron_muon.settings.patterns import pairs_of, read, written


class PeriodicMuon(DistributedMuon):
    """Muon of whole matrices in every step whose number, from 0, ``full_period``
    divides, and of each TP slice in the others.

    Adam's number of steps, which is in every checkpoint, says the number after a load.
    """

    block: DistributedMuon  # set before the first step
    _steps: int | None = None  # unknown before the first step, after a load

    def start(
        self, groups: ParamGroups, states: States, *, works: bool = False
    ) -> None:
        """See ``Engine``; raises ValueError on every rank of the stage where ranks have
        loaded different steps.
        """
        Engine.start(self._muon_of_step(states), groups, states, works=works)

    def step(
        self, groups: ParamGroups, states: States, step_adamw: Callable[[], None]
    ) -> None:
        """See ``Engine`` and ``start``."""
        muon = self._muon_of_step(states)
        muon.start_next = self.start_next
        Engine.step(muon, groups, states, step_adamw)
        assert self._steps is not None
        self._steps += 1

    def forget_step(self) -> None:
        """See ``Engine``; the number of steps is read anew, too."""
        super().forget_step()
        self.block.forget_step()
        self._steps = None

    def _muon_of_step(self, states: States) -> DistributedMuon:
        if self._steps is None:
            self._steps = self._agreed_steps(states)
        is_full = self._steps % self.config.full_period == 0
        return self if is_full else self.block

    def _agreed_steps(self, states: States) -> int:
        """The steps taken; ranks without parameters may know none."""
        exchange = self.exchange
        gathered = collectives.all_gather_numbers(
            [states.steps()], exchange.group, exchange.device
        )
        known = sorted({steps for (steps,) in gathered} - {0})
        if len(known) > 1:
            raise ValueError(
                f"the ranks of a pipeline stage have taken {known} steps, so none "
                "knows which step is full (--muon-full-period): load one checkpoint "
                "on all ranks, or omit the flag"
            )
        return max(known, default=0)


def block_numerics(numerics: Numerics) -> Numerics:
    """The numerics of block steps, as of a run that takes no other ones.

    ``block_lr_mult`` goes into the factor of a direction, and so not into the weight
    decay.
    """
    config = numerics.config
    factor = config.block_lr_mult
    by_pattern = []
    for pattern, text in pairs_of(config.by_pattern):
        settings = dict(read(text))
        if "rms" in settings:
            settings["rms"] *= factor
        by_pattern.append(f"{pattern}:{written(settings)}")
    of_block = replace(
        config,
        full_period=1,
        block_lr_mult=1.0,
        matched_adamw_rms=config.matched_adamw_rms * factor,
        by_pattern=tuple(by_pattern),
    )
    return Numerics(of_block, numerics.device)


def block_plans(
    parameters: Sequence[Sequence[Parameter]],
    grids: Sequence[RankGrid],
    numerics: Numerics,
) -> list[ExchangePlan]:
    """``make_plans`` of a stage's optimizers in a block step."""
    sliced = [list(map(in_tp_slices, each)) for each in parameters]
    return make_plans(sliced, grids, numerics)


def in_tp_slices(parameter: Parameter) -> Parameter:
    """The parameter with a matrix for what each TP rank has of one; itself where TP
    cuts none.
    """
    if parameter.partition_dim is None or len(parameter.blocks) == 1:
        return parameter
    matrices: list[Matrix] = []
    blocks: list[tuple[Block, ...]] = []
    for tp_rank, of_rank in enumerate(parameter.blocks):
        # by each matrix here, in the order of their elements: the rows so far
        rows: dict[int, int] = {}
        own: list[Block] = []
        for block in sorted(of_rank, key=lambda block: block.rows):
            start = rows.setdefault(block.matrix, 0)
            number = len(matrices) + list(rows).index(block.matrix)
            own.append(Block(number, block.rows, start))
            rows[block.matrix] += block.rows.size
        for index, count in rows.items():
            whole = parameter.matrices[index]
            name = f"{whole.name}{SLICE_OF}{tp_rank}]"
            matrices.append(
                replace(whole, name=name, rows=count, cols=parameter.shape[1])
            )
        blocks.append(tuple(own))
    # none of these has columns on another rank
    return replace(
        parameter, partition_dim=0, matrices=tuple(matrices), blocks=tuple(blocks)
    )
