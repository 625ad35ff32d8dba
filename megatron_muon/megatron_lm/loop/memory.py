"""A correction of Megatron-LM's theoretical memory, which counts AdamW's state even with Muon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_muon.console import say
from megatron_muon.megatron_lm.flags.namespace import is_on

# Bytes per element: an fp32 main parameter with two moments (AdamW) or one momentum (Muon).
ADAMW_BYTES, MUON_BYTES = 12, 8
_has_said = False


def report_theoretical_memory(
    original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any
) -> Any:
    """Megatron's report; the first one in a run with Muon is followed by a line that corrects it.

    Megatron's figure stays as it is: its formula differs between releases, and some count the
    experts of all ranks.
    """
    global _has_said
    result = original(args, *rest, **kwargs)
    if is_on(args) and not _has_said:
        _has_said = True
        say(f"[megatron_muon] {less_than_adamw()}")
    return result


def less_than_adamw() -> str:
    """A line: how much less state the mean rank of this stage has than Megatron reports, in MiB."""
    from megatron_muon.mcore.wiring.buffers.state_size import muon_elements

    elements = muon_elements()
    saved = elements * (ADAMW_BYTES - MUON_BYTES) / 2**20
    return (
        f"Megatron's theoretical memory counts AdamW's {ADAMW_BYTES} bytes an element for main "
        f"parameter and state; what is Muon's has {MUON_BYTES}: about {saved:.2f} MB less on a "
        f"rank of this stage, which has {elements / 1e6:.2f} M such elements"
    )
