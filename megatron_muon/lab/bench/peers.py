"""Newton-Schulz iterations of other packages, as far as they can be imported, for the
bench.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_muon.orthogonalize.matmul import fp32_products
from megatron_muon.settings.coefficients import CoefficientName, schedule

Run = Callable[[Tensor], object]
# Of all rows but dion's, which has five triples of its own; the work is the same.
_SET: CoefficientName = "simple"


def peers(
    steps: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Run | str]]:
    """(name, iteration of one matrix) of each package, or (name, reason why it cannot
    run).

    Each is tried on a small matrix of ``dtype``, since packages and their releases
    differ.
    """
    for name, make in _PEERS.items():
        try:
            run = make(steps, device)
            run(torch.ones(8, 16, device=device, dtype=dtype))
        # a package may raise anything; the other rows go on
        except Exception as reason:
            lines = str(reason).strip().splitlines() or [type(reason).__name__]
            yield name, lines[0]
        else:
            yield name, run


def _torchs(steps: int, device: torch.device) -> Run:
    module = importlib.import_module("torch.optim._muon")
    iterate: Any = module._zeropower_via_newtonschulz
    triple = schedule(_SET, steps)[0]
    return lambda x: iterate(x, triple, steps, 1e-7)


def _emergings(steps: int, device: torch.device) -> Run:
    name = "emerging_optimizers.orthogonalized_optimizers.muon_utils"
    iterate: Any = importlib.import_module(name).newton_schulz

    def run(x: Tensor) -> object:
        with fp32_products("medium"):  # it runs in bf16 then
            return iterate(x.float(), steps, _SET)

    return run


def _dions(steps: int, device: torch.device) -> Run:
    iterate: Any = importlib.import_module("dion.newton_schulz_triton")
    run: Run = iterate.zeropower_via_newtonschulz5
    return run


def _grams(steps: int, device: torch.device) -> Run:
    made: Any = importlib.import_module("gram_newton_schulz").GramNewtonSchulz(
        ns_use_kernels=device.type == "cuda",
        ns_coefficients=[list(triple) for triple in schedule(_SET, steps)],
        gram_newton_schulz_reset_iterations=[2],
        compile_kwargs=None,
    )
    return lambda x: made(x.clone())


_PEERS: dict[str, Callable[[int, torch.device], Run]] = {
    "torch.optim.Muon": _torchs,
    "emerging_optimizers": _emergings,
    "dion": _dions,
    "gram-newton-schulz": _grams,
}
