"""What a rank did in its last step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Meter:
    """Counts of this rank's last step, made where the work is done, not from the
    plan.
    """

    steps: int = 0  # number of steps so far
    matrices: int = 0  # number of matrices worked on at home
    ns_flops: int = 0  # floating-point operations of that work, 2 per multiply-add
    gather_bytes: int = 0  # bytes sent to homes
    scatter_bytes: int = 0  # bytes of results sent to slices
    square_bytes: int = 0  # bytes of squares sent to the other homes of shared matrices
    # bytes of elements sent to them, of wide matrices that come as rows
    turn_bytes: int = 0

    @property
    def sent_bytes(self) -> int:
        """All bytes that this rank sent to others."""
        return (
            self.gather_bytes + self.scatter_bytes + self.square_bytes + self.turn_bytes
        )

    def start_step(self) -> None:
        self.steps += 1
        self.matrices = self.ns_flops = 0
        self.gather_bytes = self.scatter_bytes = self.square_bytes = self.turn_bytes = 0
