"""Megatron-LM's theoretical memory, which counts AdamW's state whatever the optimizer is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_muon.megatron_lm.namespace import is_on

ADAMW_BYTES, MUON_BYTES = 12, 8  # of an element: fp32 main parameter and moments, or momentum
_has_said = False


def report_theoretical_memory(
    original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any
) -> Any:
    """Megatron's, and the first time in a run of Muon's a line on what is to be taken off it.

    Its formula is another in each release and counts the experts of all ranks in some, so the
    figure is left as it is.
    """
    global _has_said
    result = original(args, *rest, **kwargs)
    if is_on(args) and not _has_said:
        _has_said = True
        print(f"[megatron_muon] {less_than_adamw()}", flush=True)
    return result


def less_than_adamw() -> str:
    """How much less state a rank of this pipeline stage has than Megatron says.

    A rank's share of its stage, in MB of 1024 x 1024 bytes, as Megatron's; shards are equal but for
    padding, so which rank has more of Muon's and which of AdamW's depends on the layout.
    """
    from megatron_muon.mcore.state_size import muon_elements

    elements = muon_elements()
    saved = elements * (ADAMW_BYTES - MUON_BYTES) / 2**20
    return (
        f"Megatron's theoretical memory counts AdamW's {ADAMW_BYTES} bytes an element for main "
        f"parameter and state; what is Muon's has {MUON_BYTES}: about {saved:.2f} MB less on a "
        f"rank of this stage, which has {elements / 1e6:.2f} M such elements"
    )
