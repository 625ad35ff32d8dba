"""``megatron-muon plan``: what Muon costs in a run that has not started."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Sequence
from typing import Any

from megatron_muon.lab.plan.charts import require_outputs
from megatron_muon.lab.plan.options import DEVICES, PROGRAM, hardware_given, parsed, parser
from megatron_muon.lab.routes.model_flags import REFUSALS, imported_config_class, said


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        0; wrong arguments end the process with status 2, as argparse does.
    """
    config_class = imported_config_class(PROGRAM)
    made = parser(config_class)
    given, notes = parsed(made, argv, config_class)
    for note in notes:
        print(f"{PROGRAM}: {note}", file=sys.stderr)
    command = _Command(made, list(argv), config_class)
    try:
        require_outputs(given)
        written = command.swept(given) if given.sweep else command.planned(given)
        if given.json is not None:
            given.json.write_text(json.dumps(written, indent=1))
    except (*REFUSALS, TypeError, OSError) as error:
        made.error(said(error))
    return 0


class _Command:
    """A command line, which can be planned with further flags."""

    def __init__(self, made: ArgumentParser, argv: list[str], config_class: type) -> None:
        self._parser, self._argv, self._config_class = made, argv, config_class

    def planned(self, given: Namespace) -> dict[str, Any]:
        """Print the plan of the run; return all of its figures."""
        from megatron_muon.lab.plan import explain
        from megatron_muon.lab.plan.report import as_dict, as_text

        plan = self._plan(given)
        print(as_text(plan))
        written = as_dict(plan)
        if given.explain:
            slowest = max(plan.kinds, key=lambda kind: kind.row(plan.layout).seconds)
            stage = ["--stage", str(slowest.stages[0])] if plan.ranks.pp > 1 else []
            made = explain.gains(plan, lambda words: self._with([*stage, *words], own=True))
            print(f"\n{explain.as_text(plan, made)}")
            written["changes"] = explain.as_json_ready(plan, made)
        return written

    def swept(self, given: Namespace) -> dict[str, Any]:
        """Print a row for each value; return all figures."""
        from megatron_muon.lab.plan import sweep

        asked = sweep.parsed_sweep(given.sweep)
        sizes = (
            given.tensor_model_parallel_size
            * given.context_parallel_size
            * given.pipeline_model_parallel_size
        )
        made = list(sweep.points(asked, self._with, sizes))
        print(sweep.as_text(asked, made))
        if given.plot is not None:
            from megatron_muon.lab.plan.plot import plot

            plot(asked, made, given.plot)
        return sweep.as_json_ready(asked, made)

    def _with(self, words: Sequence[str], *, own: bool = False) -> Any:
        """The plan with further flags.

        Args:
            words: flags that go behind those of the command line.
            own: leave out what is not the run's own layout or AdamW's.
        """
        given, _ = parsed(self._parser, [*self._argv, *words], self._config_class)
        return self._plan(given, (given.muon_dp_layout or "contiguous",) if own else None)

    def _plan(self, given: Namespace, wanted: Collection[Any] | None = None) -> Any:
        from megatron_muon.lab.plan.rows import NAMES
        from megatron_muon.lab.plan.run import plan_run

        device = DEVICES[given.products]
        return plan_run(given, hardware_given(given), device, NAMES if wanted is None else wanted)
