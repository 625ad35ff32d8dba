"""``megatron-muon plan``: what Muon costs in a run that has not started."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_muon.cli.model_flags import REFUSALS, imported_config_class, said
from megatron_muon.cli.plan.options import DEVICES, PROGRAM, hardware_given, parsed, parser
from megatron_muon.files.writable import require_writable


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
    from megatron_muon.cli.plan.report import as_json, as_text
    from megatron_muon.cli.plan.run import plan_run

    try:
        hardware = hardware_given(given)
        if given.json is not None:
            require_writable("--json", given.json)
        plan = plan_run(given, hardware, DEVICES[given.products])
    except (*REFUSALS, TypeError, OSError) as error:
        made.error(said(error))
    for note in notes:
        print(f"{PROGRAM}: {note}", file=sys.stderr)
    print(as_text(plan))
    if given.json is not None:
        given.json.write_text(as_json(plan))
    return 0
