"""``megatron-muon plan``: what Muon costs in a run that has not started."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Collection, Sequence
from typing import Any

from megatron_muon.lab.outputs import require_outputs
from megatron_muon.lab.plan.options import DEVICES, PROGRAM, command_line, hardware_given
from megatron_muon.lab.routes.model_flags import REFUSALS, CommandLine, import_megatron, said, stop


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        0; wrong arguments end the process with status 2, as argparse does.
    """
    line = command_line(argv)
    import_megatron(PROGRAM, script=line.script)
    command = _Command(line)
    given = line.given
    try:
        require_outputs(given)
        written = command.swept(given) if given.sweep else command.planned(given)
        if given.json is not None:
            given.json.write_text(json.dumps(written, indent=1))
    except (*REFUSALS, TypeError, OSError) as error:
        stop(said(error), PROGRAM)
    return 0


class _Command:
    """A command line, which can be planned with further flags."""

    def __init__(self, line: CommandLine) -> None:
        self._line = line

    def planned(self, given: Namespace) -> dict[str, Any]:
        """Print the plan of the run; return all of its figures."""
        from megatron_muon.lab.plan import explain
        from megatron_muon.lab.plan.report import as_dict, as_text

        plan = self._plan(())
        print(as_text(plan))
        written = as_dict(plan)
        if given.explain:
            slowest = max(plan.kinds, key=lambda kind: kind.row(plan.layout).seconds)
            stage = ["--stage", str(slowest.stages[0])] if plan.ranks.pp > 1 else []
            made = explain.gains(plan, lambda words: self._plan([*stage, *words], ()))
            print(f"\n{explain.as_text(plan, made)}")
            written["changes"] = explain.as_json_ready(plan, made)
        return written

    def swept(self, given: Namespace) -> dict[str, Any]:
        """Print a row for each value; return all figures."""
        from megatron_muon.lab.plan import sweep

        asked = sweep.parsed_sweep(given.sweep)
        sizes = self._line.sizes()
        ranks = sizes.tensor_model_parallel_size * sizes.context_parallel_size
        made = list(sweep.points(asked, self._plan, ranks * sizes.pipeline_model_parallel_size))
        print(sweep.as_text(asked, made))
        if given.plot is not None:
            from megatron_muon.lab.plan.plot import plot

            plot(asked, made, given.plot)
        return sweep.as_json_ready(asked, made)

    def _plan(self, words: Sequence[str], wanted: Collection[Any] | None = None) -> Any:
        """The plan with further flags.

        Args:
            words: flags that go behind those of the command line.
            wanted: the algorithms beside AdamW and the run's own layout; None for all.
        """
        from megatron_muon.lab.plan.rows import NAMES
        from megatron_muon.lab.plan.run import plan_run

        given = self._line.options(self._line.own(words))
        device, names = DEVICES[given.products], NAMES if wanted is None else wanted
        return plan_run(self._line, hardware_given(given), device, names, words)
