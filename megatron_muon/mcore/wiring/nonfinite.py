"""Names matrices that were not updated since a direction was not finite, and ends a run
in which one stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist

from megatron_muon.console import first_names, say
from megatron_muon.mcore.host.loop import host
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.layout import SLICE_OF
from megatron_muon.rules.muon import DistributedMuon
from megatron_muon.runtime.collectives import Group, all_gather_json, any_rank
from megatron_muon.runtime.nonfinite import Skipped
from megatron_muon.settings.config import named
from megatron_muon.settings.rules import OWN, row_of

# steps, where neither the loop nor a setting says it: Megatron-LM's own default
_INTERVAL = 100


class NonfiniteReport:
    """Reports a chain's directions that are not finite, on one rank.

    They are named at the next line of the log: every ``--log-interval`` steps in
    Megatron-LM's loop, elsewhere every ``log_interval`` or 100. Ranks communicate then
    only, and only then the host waits for the device. A momentum that is not finite
    stays so: its home names it as soon as the host knows of it, on a GPU at the start
    of the next step.
    """

    def __init__(
        self,
        muons: Sequence[DistributedMuon],
        numerics: Numerics,
        group: Group | None,
        device: torch.device,
    ) -> None:
        self._muons = list(muons)
        self._group = group
        self._device = device
        self._numerics = numerics
        self._limit = numerics.config.nonfinite_limit
        self._interval = numerics.config.log_interval or _INTERVAL
        self._steps = self._number = 0
        self._lines: int | None = None  # lines of the log before the last step
        self._momenta: set[str] = set()  # names of matrices whose momentum was named
        self._before: dict[tuple[int, str], Skipped] = {}  # counts at the last line
        self._in_a_row: dict[str, int] = {}  # lines, by matrix; the same on every rank

    def before_step(self) -> None:
        """Name momenta of the step before, if the device is done with it."""
        for (_, matrix), skipped in self._counts(waits=False).items():
            name = matrix.split(SLICE_OF)[0]
            if skipped.inputs and name not in self._momenta:
                self._momenta.add(name)
                say(
                    f"[megatron_muon] step {self._number}: the momentum of {name} is "
                    "not finite, and stays so; the matrix is not updated any more"
                )

    def after_step(self) -> None:
        """All ranks call it; FloatingPointError once ``nonfinite_limit`` lines name a
        matrix.
        """
        self._steps += 1
        self._number = host().step() or self._steps
        interval = host().log_interval() or self._interval
        lines = (self._number - 1) // interval if self._lines is None else self._lines
        self._lines = self._number // interval
        self.before_step()
        if self._lines != lines:
            self._log()

    def _counts(self, *, waits: bool) -> dict[tuple[int, str], Skipped]:
        """By the number of the optimizer, and the matrix."""
        counts: dict[tuple[int, str], Skipped] = {}
        for at, muon in enumerate(self._muons):
            for name, skipped in muon.nonfinite.skipped(waits=waits).items():
                counts[at, name] = skipped
        return counts

    def _log(self) -> None:
        """Name the matrices not updated since the last line, once for all ranks."""
        counts = self._counts(waits=True)
        here: list[tuple[str, Skipped]] = []
        for key, skipped in counts.items():
            new = skipped.since(self._before.get(key))
            if new.results:
                here.append((key[1].split(SLICE_OF)[0], new))
        self._before = counts
        vote = torch.tensor(bool(here), device=self._device)
        if not any_rank("muon/log", vote, self._group):
            self._in_a_row = {}
            return
        # several homes may name one matrix: of its strips or slices, of full and of
        # block steps, or of optimizer instances; the most that one of them saw counts
        every: dict[str, Skipped] = {}
        for name, numbers in chain.from_iterable(all_gather_json(here, self._group)):
            new = Skipped(*numbers)
            every[name] = max(new, every.get(name, new))
        self._in_a_row = {
            name: self._in_a_row.get(name, 0) + 1 for name in sorted(every)
        }
        # as Megatron's log
        if dist.get_rank(self._group) == dist.get_world_size(self._group) - 1:
            for name in self._in_a_row:
                say(
                    f"[megatron_muon] step {self._number}: {name} was not updated in "
                    f"at least {every[name].results} steps since the last line: its "
                    "direction was not finite"
                    + ", nor its momentum"
                    * bool(every[name].inputs)
                )
        ended = [name for name, count in self._in_a_row.items() if count >= self._limit]
        if ended:
            momenta = any(every[name].inputs for name in ended)
            raise FloatingPointError(
                f"{first_names(ended, 5)}: the direction was not finite before each of "
                f"the last {self._limit} lines of the log "
                f"({named('nonfinite_limit')}), so these matrices were not updated. "
                f"{_OF_MOMENTA if momenta else _of_directions(self._numerics)}"
            )


_OF_MOMENTA = (
    "The momentum is not finite either and will not recover: resume from an earlier "
    "checkpoint. With --check-for-nan-in-loss-and-grad Megatron names gradients that "
    "are not finite"
)


def _of_directions(numerics: Numerics) -> str:
    """The way out where the momentum is finite, without what is in force already."""
    exclude = f"give the weight to AdamW by {named('muon_exclude')}"
    rule = row_of(numerics.config.rule)
    if rule is OWN:
        return f"The momentum is finite, so the rule's function overflowed: {exclude}"
    safer = []
    if numerics.iteration != "standard":
        safer.append(f"{named('ns_iteration')} standard")
    if numerics.dtype == "fp16":
        safer.append(f"{named('ns_dtype')} bf16")
    if numerics.config.ns_coefficients != "simple":
        safer.append(f"{named('ns_coefficients')} simple")
    ways = [f"set {' and '.join(safer)}"] if safer else []
    overflowed = "Newton-Schulz"
    if rule.adapts:  # it has sums of squares of gradients
        overflowed += ", or the square of a norm,"
        ways.append("resume from an earlier checkpoint with --clip-grad")
    return (
        f"The momentum is finite, so {overflowed} overflowed: "
        f"{', or '.join([*ways, exclude])}"
    )
