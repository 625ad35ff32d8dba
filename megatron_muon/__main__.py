"""``python -m megatron_muon``, the same as the command ``megatron-muon``.

With a training script it runs the script (``megatron_lm.launch``), else a command of
``lab``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a training script or a command, by default by the arguments of the process.

    Returns:
        The exit status: 0 once a script has ended; a command's own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = arguments[0] if arguments else ""
    if first == "--muon-cpu" or first.endswith(".py") or "/" in first:
        from megatron_muon.megatron_lm.launch import main as launch

        launch(arguments)
        return 0
    from megatron_muon.lab.commands import main as command

    return command(arguments)


if __name__ == "__main__":
    sys.exit(main())
