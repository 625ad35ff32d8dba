"""Checks that no act of ``consensus.together`` communicates.

An act that raises on one rank goes to the vote, while the others wait for it in what it
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_muon.runtime import consensus
from megatron_muon.runtime.patches import Patches

# How the names of a ProcessGroup's methods begin that communicate.
_COMMUNICATES = tuple(
    """
    all _all gather scatter broadcast reduce _reduce barrier monitored_barrier send recv
""".split()
)


def hold_acts() -> None:
    """Make a message of a process group inside an act an error of that act, in this
    process.
    """
    inside: list[Callable[[], object]] = []
    attempt = consensus.attempt

    def held(act: Callable[[], Any]) -> Any:
        inside.append(act)
        try:
            return attempt(act)
        finally:
            inside.pop()

    def message(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def send(*args: Any, **kwargs: Any) -> Any:
            assert not inside, f"{inside[-1]} communicates: {name}"
            return original(*args, **kwargs)

        return send

    patches = Patches()
    patches.set(consensus, "attempt", held)
    for name in dir(dist.ProcessGroup):
        if name.startswith(_COMMUNICATES):
            patches.set(
                dist.ProcessGroup, name, message(name, getattr(dist.ProcessGroup, name))
            )
