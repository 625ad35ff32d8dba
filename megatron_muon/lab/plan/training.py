"""The rest of a training step, of which the optimizer's step is a share. It is not
simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_muon.lab.dry_run.model import Run
from megatron_muon.lab.pricing.hardware import TERA, Hardware

# Assumptions with their sources; each can be set.
MFU = 0.40
_MFU_SOURCE = (
    "38 to 43 % on 8,192 and 16,384 H100s, https://arxiv.org/abs/2407.21783, table 4"
)
_TOKENS = 1 << 22
_SEQUENCE = 4096
_TOKENS_SOURCE = (
    "Llama 3 405B's first batch, https://arxiv.org/abs/2407.21783, section 3.4.1"
)
_FLOPS_SOURCE = (
    "6 a parameter that a token activates and 6 x layers x heads x head size x "
    "sequence for causal attention: https://arxiv.org/abs/2204.02311, appendix B, "
    "halved for the mask"
)


@dataclass(frozen=True, slots=True)
class Training:
    """Forward and backward of a step."""

    tokens: int  # of a step, over all ranks
    sequence: int  # tokens of a sequence
    flops_per_token: float  # of forward and backward
    mfu: float  # share of the peak that forward and backward reach
    ranks: int  # number of ranks

    def seconds(self, hardware: Hardware) -> float:
        """The time of forward and backward."""
        rate = hardware.dense_tflops * TERA * self.mfu
        return self.tokens * self.flops_per_token / (self.ranks * rate)


def training_of(
    run: Run, mfu: float | None, active: int
) -> tuple[Training, tuple[str, ...]]:
    """Forward and backward, and what is assumed about them.

    ``active`` is the number of parameters that a token goes through.
    """
    sequence = run.sequence_length or _SEQUENCE
    tokens = _TOKENS
    source = f"({_TOKENS_SOURCE}); --global-batch-size"
    if run.global_batch_size is not None:
        tokens = run.global_batch_size * sequence
        source = f"(--global-batch-size x sequences of {sequence:,})"
    flops = 6.0 * active + 6.0 * run.attention_width * sequence
    of_mfu = _MFU_SOURCE if mfu is None else "--mfu"
    training = Training(
        tokens, sequence, flops, MFU if mfu is None else mfu, run.ranks.world
    )
    return training, (
        f"tokens per step {tokens:,} {source}",
        f"mfu of forward and backward {training.mfu:g} ({of_mfu}); --mfu",
        f"flops per token {flops:.4g}, {active:,} active parameters ({_FLOPS_SOURCE})",
    )
