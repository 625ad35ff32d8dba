"""What a run computes with: its settings and what its kind of device decides, resolved
once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from megatron_muon.settings.coefficients import NsDtype, Triple, schedule, set_of
from megatron_muon.settings.config import MuonConfig, NsIteration, SplitMatrices
from megatron_muon.settings.rules import row_of

# cpu_bf16 has instructions for products in bf16; on cpu, all products are made in fp32.
# cuda_symmetric and cuda_triton have a kernel for symmetric products in 16 bits, of
# quack-kernels and of this package (``matmul``).
Device = Literal["cpu", "cpu_bf16", "cuda", "cuda_symmetric", "cuda_triton"]
Steps = tuple[Triple, ...]
Segments = tuple[Steps, ...]


@dataclass(frozen=True, slots=True)
class Numerics:
    """Settings of a run on a kind of device, the same on all of its ranks; plain data.

    Attributes:
        config: the settings. Of those below only their resolved values are to be read.
        device: the kind of device of all ranks.
        dtype: the dtype to which matrices are rounded. By default bf16. The preset
            ``fast`` takes fp16 on a GPU, where both have one speed and fp16 rounds
            eight times as finely, so that the Gram iteration restarts less often.
        held: the dtype in which matrices are held and multiplied, the Gram iteration's
            squares too.
        travels: the dtype of what travels to homes: bf16, whose exponents are fp32's,
            or fp32.
        folded: whether the standard iteration makes aX + BX as (a + B)X, and Gram's
            squares likewise. CUDA's matmul copies a linear term into its result: a pass
            over X in each step, and B is smaller. It rounds a + B, so that where the
            plain step is nearly exact the error is up to 64 units of the dtype: as much
            as 8 of bf16's in fp16, too much in bf16. The Gram iteration's error grows
            with no list of restarts.
        products: the kind of device whose products these are: fp32 uses neither bf16
            instructions nor a library's kernel.
        steps: (a, b, c) of each step, the same on every device.
        segments: the steps cut where the Gram iteration restarts; empty where no
            restarts are known for these coefficients, this number of steps and the
            dtype.
        wanted_iteration: by default ``standard``; ``auto`` on a GPU with the preset
            ``fast``.
        iteration: ``standard`` in place of ``auto`` where no restarts are known.
        split: how many ranks share a matrix. By default ``auto`` on a GPU, where no
            numbers of matrices are logged and the rule takes strips, and ``off``
            elsewhere.
    """

    config: MuonConfig
    device: Device = "cuda"
    dtype: NsDtype = field(init=False, compare=False)
    held: NsDtype = field(init=False, compare=False)
    travels: NsDtype = field(init=False, compare=False)
    folded: bool = field(init=False, compare=False)
    products: Device = field(init=False, compare=False)
    steps: Steps = field(init=False, compare=False)
    segments: Segments = field(init=False, compare=False)
    wanted_iteration: NsIteration = field(init=False, compare=False)
    iteration: NsIteration = field(init=False, compare=False)
    split: SplitMatrices = field(init=False, compare=False)

    def __post_init__(self) -> None:
        config, on_gpu = self.config, is_cuda(self.device)
        is_fast = on_gpu and config.preset == "fast"
        dtype = config.ns_dtype or ("fp16" if is_fast else "bf16")
        keeps = on_gpu or (self.device == "cpu_bf16" and dtype == "bf16")
        held: NsDtype = dtype if keeps else "fp32"
        products = self.device
        if held == "fp32":
            products = "cuda" if on_gpu else "cpu"
        steps = schedule(config.ns_coefficients, config.ns_steps)
        segments = _segments(config, steps, dtype if held == dtype else "fp32_squares")
        wanted = config.ns_iteration or ("auto" if is_fast else "standard")
        may_share = config.log_interval is None and row_of(config.rule).shares
        split = "auto" if on_gpu and may_share else "off"
        resolved = {
            "dtype": dtype,
            "held": held,
            "travels": "fp32" if config.ns_dtype == "fp32" else "bf16",
            "folded": on_gpu and dtype == "fp16",
            "products": products,
            "steps": steps,
            "segments": segments,
            "wanted_iteration": wanted,
            "iteration": wanted if segments or wanted == "gram" else "standard",
            "split": split if config.split_matrices is None else config.split_matrices,
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU, of either kind."""
        return is_cuda(self.device)

    @property
    def itemsize(self) -> int:
        """Bytes of an element that travels."""
        return 4 if self.travels == "fp32" else 2

    def where(self, own: str) -> Numerics:
        """Those of a matrix with settings of its own, ``KEY=VALUE,...``."""
        return _where(self, own) if own else self

    @property
    def costs_follow_device(self) -> bool:
        """Whether a plan's costs do; not with whole matrices, standard steps, plain
        products.
        """
        squares = not self.on_gpu and self.split != "off"  # in bf16 or in fp32
        return squares or has_kernel(self.products) or self.iteration != "standard"


@lru_cache(1024)
def _where(numerics: Numerics, own: str) -> Numerics:
    return Numerics(numerics.config.where(own), numerics.device)


def is_cuda(device: Device) -> bool:
    """Whether a kind of device is a GPU."""
    return device == "cuda" or has_kernel(device)


def has_kernel(device: Device) -> bool:
    """Whether a kind of device has a kernel for symmetric products."""
    return device in ("cuda_symmetric", "cuda_triton")


def layout_free(config: MuonConfig, *, is_deterministic: bool) -> MuonConfig:
    """The settings of a run; in torch's deterministic mode no bit may depend on the
    layout.

    By default the layout decides which matrices are shared, so none is.
    """
    if is_deterministic and config.split_matrices is None:
        return replace(config, split_matrices="off")
    return config


def _segments(config: MuonConfig, steps: Steps, kind: str) -> Segments:
    """The steps between the restarts that are known for squares of a kind; none if
    unknown.
    """
    lists = set_of(config.ns_coefficients).restarts.get(config.ns_steps)
    restarts: tuple[int, ...] | None = getattr(lists, kind, None)
    if restarts is None:
        return ()
    cuts = (0, *restarts, config.ns_steps)
    return tuple(steps[start:stop] for start, stop in itertools.pairwise(cuts))
