"""Run a command by its name; its module is imported only then."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence

Commands = Mapping[str, tuple[str, str]]  # name: (module with main(argv) -> status, what it does)


def dispatch(program: str, commands: Commands, arguments: Sequence[str], ends: str = "") -> int:
    """Run the command that the first argument names.

    Args:
        program: the words before the command's name, such as ``megatron-muon``.
        commands: the commands by name.
        arguments: the command's name and its own arguments.
        ends: the end of the usage line.

    Returns:
        The exit status: the command's own, 0 for help, 2 without a name or with an unknown one.
    """
    usage = _usage(program, commands, ends)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in commands:
        print(f"{program}: error: no command {name!r}\n{usage}", file=sys.stderr)
        return 2
    return int(importlib.import_module(commands[name][0]).main(rest))


def _usage(program: str, commands: Commands, ends: str) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:{width}}  {purpose}" for name, (_, purpose) in commands.items()]
    return "\n".join([f"usage: {program} COMMAND ... (COMMAND --help says more){ends}", "", *lines])
