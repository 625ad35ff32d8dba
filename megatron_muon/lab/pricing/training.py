"""The rest of a training step, of which the optimizer's step is a share. It is not simulated."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_muon.lab.pricing.hardware import TERA, Hardware

# Assumptions with their sources; each can be set.
TOKENS = 1 << 22
TOKENS_SOURCE = "Llama 3 405B's first batch, https://arxiv.org/abs/2407.21783, section 3.4.1"
MFU = 0.40
MFU_SOURCE = "38 to 43 % on 8,192 and 16,384 H100s, https://arxiv.org/abs/2407.21783, table 4"
FLOPS_SOURCE = (
    "6 a parameter that a token activates and 6 x layers x heads x head size x sequence for causal "
    "attention: https://arxiv.org/abs/2204.02311, appendix B, halved for the mask"
)


@dataclass(frozen=True, slots=True)
class Training:
    """Forward and backward of a step.

    Attributes:
        tokens: of a step, over all ranks.
        flops_per_token: of forward and backward.
        mfu: share of the peak that forward and backward reach.
        ranks: number of ranks.
    """

    tokens: int
    flops_per_token: float
    mfu: float
    ranks: int

    def seconds(self, hardware: Hardware) -> float:
        """The time of forward and backward."""
        rate = hardware.dense_tflops * TERA * self.mfu
        return self.tokens * self.flops_per_token / (self.ranks * rate)


def flops_per_token(
    active: int, *, layers: int, heads: int, head_size: int, sequence: int
) -> float:
    """Flops of forward and backward for a token; see ``FLOPS_SOURCE``.

    Args:
        active: parameters that it goes through.
        layers: number of layers with attention.
        heads, head_size: of attention.
        sequence: tokens of a sequence.
    """
    return 6.0 * active + 6.0 * layers * heads * head_size * sequence
