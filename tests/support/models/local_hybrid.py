"""Layers of hybrid models from Megatron's local modules, to train on a CPU without
their kernels.

Megatron specifies them with Transformer Engine's modules only. mamba_ssm,
flash-linear-attention and einops have stand-ins: modules can be made, and tests give
them forward passes of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_muon.runtime.patches import replaced

_SSM = "megatron.core.ssm."
MIXER = f"{_SSM}mamba_mixer"
_DELTA = (
    "megatron.core.ssm.gated_delta_net"  # one module in 0.16 to 0.18, several later
)
# Modules that Megatron's own need at import, by the package that the error names: the
# first in 0.15 and 0.16, the others before 0.13.
_NEEDED = {
    "triton": ("triton", "triton.language"),
    "transformer_engine": ("megatron.core.extensions.transformer_engine",),
    "mamba_ssm": (
        "mamba_ssm",
        "mamba_ssm.ops",
        "mamba_ssm.ops.triton",
        "mamba_ssm.ops.triton.layernorm_gated",
        "mamba_ssm.ops.triton.ssd_combined",
    ),
}


def _kernel(*args: Any, **options: Any) -> Any:
    raise AssertionError("nothing is run here")


_FLA: dict[str, Any] = {
    "HAVE_FLA": True,
    "HAVE_FLA_GDN2": True,
    "chunk_gated_delta_rule": _kernel,
    "chunk_gdn2": _kernel,
}


@contextmanager
def without_kernels() -> Iterator[None]:
    """Mamba mixers and gated delta nets can be made within it."""
    mixer = imported(MIXER)
    with ExitStack() as stack:
        # all that it imports
        for name in [name for name in sys.modules if name.startswith(_SSM)]:
            stack.enter_context(replaced(sys.modules[name], HAVE_EINOPS=True))
        stack.enter_context(
            replaced(mixer, ExtendedRMSNorm=_GatedNorm, HAVE_MAMBA_SSM=True)
        )
        stack.enter_context(without_fla())
        yield


@contextmanager
def without_fla() -> Iterator[None]:
    """Gated delta nets can be made within it, in the versions that have them."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(_DELTA)
    modules = [
        module for name, module in sys.modules.items() if name.startswith(_DELTA)
    ]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(replaced(module, **_FLA))
        yield


def imported(name: str) -> Any:
    """A module of Megatron's, with stand-ins for what its import needs and this machine
    lacks.

    Only for that: what Megatron can do without it finds missing, and says so afterwards
    as before.
    """
    with ExitStack() as stack:
        for _ in _NEEDED:
            try:
                return importlib.import_module(name)
            except ImportError as error:
                stack.enter_context(_standing_in(error))
        return importlib.import_module(name)


@contextmanager
def _standing_in(error: ImportError) -> Iterator[None]:
    """Stand-ins for the package whose absence is this error, or led to it."""
    names: tuple[str, ...] = ()
    cause: BaseException | None = error
    while cause is not None and not names:
        names = _NEEDED.get((getattr(cause, "name", None) or "").split(".")[0], ())
        cause = cause.__context__
    if not names or names[0] in sys.modules:
        raise error
    modules = {each: _Anything(each) for each in names}
    for each, module in modules.items():
        parent, _, child = each.rpartition(".")
        if parent in modules:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for each in names:
            del sys.modules[each]


class _GatedNorm(torch.nn.Module):
    """mamba_ssm's gated RMSNorm, as far as a model is built of it: its weight."""

    def __init__(
        self, hidden: int, device: Any = None, dtype: Any = None, **options: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Cut over TP, as Megatron's ExtendedRMSNorm says."""
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets
        )


class _AnyModule(torch.nn.Module):
    """A class made of anything, also of a function that it decorates, with options or
    without.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    def forward(self, *args: Any, **options: Any) -> Any:
        return self


class _Anything(types.ModuleType):
    """A package that has every name; each is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_AnyModule,), {})


def build_mamba(pattern: dict[str, str], config: Any, **options: Any) -> Any:
    """A model of Mamba layers alone, or this rank's part of it."""
    try:
        model = importlib.import_module(
            "megatron.core.models.hybrid.hybrid_model"
        ).HybridModel
        stack = importlib.import_module(
            "megatron.core.models.hybrid.hybrid_block"
        ).HybridStack
    except ModuleNotFoundError:  # named after Mamba before 0.18
        model = imported("megatron.core.models.mamba.mamba_model").MambaModel
        stack = imported("megatron.core.ssm.mamba_block").MambaStack
    known = inspect.signature(model).parameters
    spec_name = (
        "hybrid_stack_spec" if "hybrid_stack_spec" in known else "mamba_stack_spec"
    )
    module = sys.modules[stack.__module__]
    submodules: Any = getattr(module, f"{stack.__name__}Submodules")
    with without_kernels():
        norm = gpt_layer_specs.get_gpt_layer_local_spec(
            normalization=config.normalization
        ).submodules.input_layernorm
        spec = ModuleSpec(module=stack, submodules=submodules(mamba_layer=_mamba(norm)))
        with replaced(module, TENorm=norm):
            return model(config=config, **{spec_name: spec}, **pattern, **options)


def _mamba(norm: Any) -> ModuleSpec:
    layer = imported("megatron.core.ssm.mamba_layer")
    mixer = imported(MIXER)
    return ModuleSpec(
        module=layer.MambaLayer,
        submodules=layer.MambaLayerSubmodules(
            norm=norm,
            mixer=ModuleSpec(
                module=mixer.MambaMixer,
                submodules=mixer.MambaMixerSubmodules(
                    in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
                ),
            ),
            mamba_bda=get_bias_dropout_add,
        ),
    )


def gated_delta_spec(config: Any) -> Any:
    """A gated delta net of local modules, in place of attention."""
    name = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
    specs = importlib.import_module(name)
    local: type[Any] = importlib.import_module(
        "megatron.core.models.backends"
    ).LocalSpecProvider
    methods = {"column_parallel_layer_norm_linear": lambda self: ColumnParallelLinear}
    backend = type("Local", (local,), methods)()
    return specs.get_gated_delta_net_module_spec(config=config, backend=backend)
