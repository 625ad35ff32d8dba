"""What a rank did in its last step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Meter:
    """Counts of this rank's last step, made where the work is done, not from the plan.

    Attributes:
        steps: number of Muon steps so far.
        matrices: number of matrices orthogonalized.
        ns_flops: Newton-Schulz floating-point operations, 2 per multiply-add.
        gather_bytes: bytes sent to homes.
        scatter_bytes: bytes of directions sent to slices.
        square_bytes: bytes of squares sent to the other homes of shared matrices.
        turn_bytes: bytes of elements sent to them, where strips are turned (``layout.Strip``).
    """

    steps: int = 0
    matrices: int = 0
    ns_flops: int = 0
    gather_bytes: int = 0
    scatter_bytes: int = 0
    square_bytes: int = 0
    turn_bytes: int = 0

    @property
    def sent_bytes(self) -> int:
        """All bytes that this rank sent to others for Muon."""
        return self.gather_bytes + self.scatter_bytes + self.square_bytes + self.turn_bytes

    def start_step(self) -> None:
        self.steps += 1
        self.matrices = self.ns_flops = 0
        self.gather_bytes = self.scatter_bytes = self.square_bytes = self.turn_bytes = 0
