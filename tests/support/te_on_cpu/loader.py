"""Imports ``transformer_engine`` over the stub of its compiled module, for every
importer.
"""

from __future__ import annotations

import enum
import functools
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

PACKAGE = "transformer_engine"
COMPILED = "transformer_engine_torch"
MEGATRONS = "megatron.core.extensions.transformer_engine"  # its wrappers
_NAMES = re.compile(r"\b(?:tex|ext)\.([A-Za-z]\w*)")
_BACKENDS = re.compile(r"NVTE_Fused_Attn_Backend\.(NVTE_\w+)")


def install() -> None:
    """Be asked first for the package from now on; twice is once."""
    if PACKAGE in sys.modules:
        raise RuntimeError(f"{PACKAGE} is already imported")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(PACKAGE, _Loader))


def replace_attention() -> None:
    """Give models Megatron's DotProductAttention where they would have Transformer
    Engine's.
    """
    sys.meta_path.insert(0, _Finder(MEGATRONS, _AttentionLoader))


class _Finder(MetaPathFinder):
    """Of one module, which then has a loader around its own."""

    def __init__(self, module: str, loader: type[_Loader]) -> None:
        self.module, self.loader = module, loader

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.module:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = self.loader(spec.loader)
        return spec


class _Loader(Loader):
    """The package's own loader, and what must happen before and after it."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__file__ is not None
        _put_stub(Path(module.__file__).parent)
        os.environ.setdefault("NVTE_TORCH_COMPILE", "0")
        # its common/ then loads no CUDA library
        os.environ.setdefault("NVTE_PROJECT_BUILDING", "1")
        common: Any = importlib.import_module(f"{PACKAGE}.common")
        common.load_framework_extension = lambda framework: None
        self.own.exec_module(module)
        _answer_for_cuda()
        _accept_tensors_without_cuda()


class _AttentionLoader(_Loader):
    def exec_module(self, module: Any) -> None:
        self.own.exec_module(module)
        attention = importlib.import_module(
            "megatron.core.transformer.dot_product_attention"
        )
        module.TEDotProductAttention = attention.DotProductAttention


def _put_stub(package: Path) -> None:
    """Give the stub every name that the package's Python takes from the compiled
    module.
    """
    from support.te_on_cpu import compiled

    source = "".join(
        path.read_text() for path in sorted(package.glob("pytorch/**/*.py"))
    )
    compiled.__all__ = sorted(set(_NAMES.findall(source)))  # for `import *`
    backends = sorted(set(_BACKENDS.findall(source)))
    compiled.NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", backends)
    sys.modules[COMPILED] = compiled


def _answer_for_cuda() -> None:
    """What a forward pass asks torch.cuda, as an H100 would answer."""
    cuda: Any = torch.cuda
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_capability = lambda device=None: (9, 0)
    h100 = SimpleNamespace(name="none", major=9, minor=0, multi_processor_count=132)
    cuda.get_device_properties = lambda device=None: h100


def _accept_tensors_without_cuda() -> None:
    """Their modules refuse to be made without a GPU, and inputs that are not on one."""
    base: Any = importlib.import_module(f"{PACKAGE}.pytorch.module.base")
    module = base.TransformerEngineBaseModule
    init, prepare = module.__init__, module.prepare_forward

    @functools.wraps(init)
    def made_without_cuda(self: Any, *args: Any, **kwargs: Any) -> None:
        with mock.patch("torch.cuda.is_available", lambda: True):
            init(self, *args, **kwargs)

    @functools.wraps(prepare)
    def prepare_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _as_on_cuda():
            prepared = prepare(self, *args, **kwargs)
        return _entered_so(prepared) if hasattr(prepared, "__enter__") else prepared

    module.__init__, module.prepare_forward = made_without_cuda, prepare_forward


def _as_on_cuda() -> Any:
    return mock.patch.object(Tensor, "is_cuda", True)


@contextmanager
def _entered_so(manager: Any) -> Iterator[Any]:
    """Up to 2.10 ``prepare_forward`` is a context manager, which asks when it is
    entered.
    """
    with _as_on_cuda():
        value = manager.__enter__()
    try:
        yield value
    finally:
        manager.__exit__(None, None, None)
