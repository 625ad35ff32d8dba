"""Stand-ins for packages of kernels, so that a script builds its model without a GPU.

Transformer Engine, mamba_ssm and flash-linear-attention run on a GPU. To know which
parameters a model has, nothing of theirs is run. A stand-in has the parameters of the
original with the same names, shapes and marks, and no forward. Sources: ``Linear``,
``LayerNormLinear``, ``GroupedLinear`` of transformer_engine/pytorch/module at v2.8, and
mamba_ssm/ops/triton/layernorm_gated.py.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Collection, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch

# The packages, and the version that each stand-in reports: Megatron asks for a least
# one.
VERSIONS = {
    "transformer_engine": "2.8.0",
    "transformer_engine_torch": "2.8.0",
    "mamba_ssm": "2.2.5",
    "causal_conv1d": "1.5.2",
    "fla": "0.4.0",
    "einops": "0.8.0",
}
_Device = torch.device | str | None


def install() -> None:
    """Stand in for the packages from now on, installed ones too; Megatron is imported
    after it.

    Einops, which asks for no GPU, is itself where it is installed.
    """
    packages = set(VERSIONS)
    if importlib.util.find_spec("einops") is not None:
        packages.remove("einops")
    sys.meta_path.insert(0, _Finder(packages))


class _Named(type):
    """Classes that have every name, as a module has: ``te.pytorch.distributed`` of
    ``te``.
    """

    def __getattr__(cls, name: str) -> Any:
        path = vars(cls).get("_path")
        if path is None or name.startswith("__"):
            raise AttributeError(name)
        return _thing(f"{path}.{name}")


class _AnyModule(torch.nn.Module, metaclass=_Named):
    """A class, a function, a decorator or a context manager: whatever a name stands
    for.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter((self, self))  # of functions that return a pair

    def forward(self, *args: Any, **options: Any) -> Any:
        return self


class _Norm(torch.nn.Module):
    """LayerNorm, RMSNorm, and mamba_ssm's gated RMSNorm."""

    has_bias = False

    def __init__(
        self,
        hidden_size: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        device: _Device = None,
        dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        normalized_shape: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        size = hidden_size or normalized_shape or 0
        for name in ("weight", "bias") if self.has_bias else ("weight",):
            values = torch.empty(size, device=device, dtype=dtype or params_dtype)
            setattr(self, name, _parameter(values, sequence_parallel=sequence_parallel))


class _LayerNorm(_Norm):
    has_bias = True


class _Linear(torch.nn.Module):
    """Linear, cut over TP; ``LayerNormLinear`` and ``GroupedLinear`` by their own
    arguments.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        num_gemms: int = 0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        bias: bool = True,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype | None = None,
        device: _Device = None,
        normalization: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        make = functools.partial(torch.empty, device=device, dtype=params_dtype)
        marks = {"sequence_parallel": sequence_parallel}
        if normalization is not None:
            names = ("weight", "bias") if normalization == "LayerNorm" else ("weight",)
            for name in names:
                norm = _parameter(
                    make(in_features), sequence_parallel=sequence_parallel
                )
                setattr(self, f"layer_norm_{name}", norm)
        if parallel_mode == "column":
            out_features //= tp_size
        elif parallel_mode == "row":
            in_features //= tp_size
        self.in_features, self.out_features = in_features, out_features
        self.parallel_mode, self.tp_size = parallel_mode, tp_size
        self.num_gemms = num_gemms
        dim = 1 if parallel_mode == "row" else 0
        for number in range(num_gemms) if num_gemms else ("",):
            weight = _parallel(make(out_features, in_features), dim)
            setattr(self, f"weight{number}", weight)
            if not bias:
                setattr(self, f"bias{number}", torch.Tensor())
            elif parallel_mode == "column":
                setattr(self, f"bias{number}", _parallel(make(out_features), 0))
            else:
                of_mode = marks if parallel_mode else {}
                setattr(
                    self, f"bias{number}", _parameter(make(out_features), **of_mode)
                )

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        pass


class _LayerNormLinear(_Linear):
    def __init__(
        self, *args: Any, normalization: str = "LayerNorm", **options: Any
    ) -> None:
        super().__init__(*args, normalization=normalization, **options)


class _GroupedLinear(_Linear):
    def __init__(self, num_gemms: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, num_gemms=num_gemms, **options)


def _parameter(values: torch.Tensor, **marks: Any) -> torch.nn.Parameter:
    made = torch.nn.Parameter(values)
    made.__dict__.update(marks)
    return made


def _parallel(values: torch.Tensor, dim: int) -> torch.nn.Parameter:
    return _parameter(
        values, tensor_model_parallel=True, partition_dim=dim, partition_stride=1
    )


_KNOWN: dict[str, type[torch.nn.Module]] = {
    "transformer_engine.pytorch.Linear": _Linear,
    "transformer_engine.pytorch.LayerNormLinear": _LayerNormLinear,
    "transformer_engine.pytorch.GroupedLinear": _GroupedLinear,
    "transformer_engine.pytorch.LayerNorm": _LayerNorm,
    "transformer_engine.pytorch.RMSNorm": _Norm,
    "mamba_ssm.ops.triton.layernorm_gated.RMSNorm": _Norm,
}


@functools.cache
def _thing(path: str) -> Any:
    return _KNOWN.get(path) or _Named(
        path.rpartition(".")[2], (_AnyModule,), {"_path": path}
    )


class _Anything(types.ModuleType):
    """A module that has every name: one of ``_KNOWN``, or an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    """Finds every module of the missing packages."""

    def __init__(self, packages: Collection[str]) -> None:
        self._packages = packages

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__version__"] = VERSIONS[module.__name__.partition(".")[0]]
