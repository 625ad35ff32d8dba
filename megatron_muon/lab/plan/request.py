"""What ``megatron-muon plan`` is asked for: a run, and what it is planned with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_muon.lab.dry_run.model import Run
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.presets import hardware_of
from megatron_muon.lab.routes.model_flags import CommandLine
from megatron_muon.orthogonalize.numerics import Device

# The kind of device by the value of --products.
DEVICES: Mapping[str, Device] = {
    "torch": "cuda",
    "kernel": "cuda_symmetric",
    "triton": "cuda_triton",
}


@dataclass(frozen=True, slots=True)
class Request:
    """A run to plan."""

    run: Run
    hardware: Hardware  # of every rank
    device: Device
    mfu: float | None  # share of the peak of forward and backward; None: assumed
    stage: int | None  # the pipeline stage to plan; None: all
    line: CommandLine  # which asks for it
    flags: tuple[str, ...] = ()  # further ones, behind those of the line

    @staticmethod
    def of(line: CommandLine, *flags: str) -> Request:
        """What a command line asks for, with further flags of the command or the run.

        Raises:
            ValueError, TypeError, NotImplementedError, AssertionError, RuntimeError,
                OSError: Megatron, the plugin or this command refuses it.
        """
        options = line.options(flags)
        return Request(
            run=line.settled(flags),
            hardware=hardware_of(options.hardware, options.set),
            device=DEVICES[options.products],
            mfu=options.mfu,
            stage=options.stage,
            line=line,
            flags=flags,
        )

    def also(self, *flags: str) -> Request:
        """The same with further flags."""
        return Request.of(self.line, *self.flags, *flags)
