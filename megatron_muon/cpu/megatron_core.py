"""Replacements inside megatron-core itself, made once it is imported."""

import copy
import importlib
import inspect
import logging
from typing import Any

import torch

from megatron_muon.cpu.fused_adam import FusedAdam
from megatron_muon.runtime.patches import Patches


def adam(patches: Patches) -> None:
    """Set the names that a successful import of Transformer Engine's FusedAdam would
    have set.

    The optimizer then takes the branches of a GPU run; those for plain torch Adam lose
    the step on load (distrib_optimizer.py:642, 818).
    """
    optimizer = importlib.import_module("megatron.core.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    for module in (optimizer, distributed):
        patches.set(module, "Adam", FusedAdam)
        patches.set_existing(module, "USING_PYTORCH_OPTIMIZER", False)
        patches.set_existing(module, "HAVE_APEX_OR_TE", True)
        patches.set_existing(module, "USING_TE_OPTIMIZER", True)
        patches.set_existing(module, "USING_APEX_OPTIMIZER", False)


def _only_real_warnings(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in str(record.msg)


def rng_states(patches: Patches) -> None:
    """Megatron's get/set of ``torch.cuda.default_generators`` go to the CPU generator.

    ``fork()`` then sees the CPU state change inside the GPU context, by construction,
    so that one log message is filtered.
    """
    module = importlib.import_module("megatron.core.tensor_parallel.random")
    one = torch.default_generator
    patches.set(
        module,
        "_set_cuda_rng_state",
        lambda new_state, *_, **__: one.set_state(new_state),
    )
    patches.set_existing(
        module, "_get_cuda_rng_state", lambda *_, **__: one.get_state()
    )
    logger = logging.getLogger(module.__name__)
    logger.addFilter(_only_real_warnings)
    patches.on_undo(lambda: logger.removeFilter(_only_real_warnings))


def no_fp8_parameters(patches: Patches) -> None:
    """Casting no fp8 parameter needs nothing; core 0.12 raises before it looks at the
    list.

    It asks for Transformer Engine in each step (fp8_utils.py:301 of core 0.12.3).
    """
    module = importlib.import_module("megatron.core.fp8_utils")
    original = module._quantize_param_shard_impl
    if "model_params" in inspect.signature(original).parameters:
        return  # since core 0.13 it looks first

    def cast(model_params: list[Any], *args: Any, **kwargs: Any) -> None:
        if model_params:
            original(model_params, *args, **kwargs)

    patches.set(module, "_quantize_param_shard_impl", cast)


def pipeline_outputs(patches: Patches) -> None:
    """A pipeline stage keeps its output in memory, whatever a script's configuration
    asks for.

    Megatron-LM sets ``deallocate_pipeline_outputs`` (training/arguments.py:1324). The
    interleaved schedule then frees an output that ``isend`` still reads
    (schedules.py:1497). A GPU's allocator waits for the stream that sends it; gloo's
    threads would send what is there next.
    """
    config = importlib.import_module(
        "megatron.core.model_parallel_config"
    ).ModelParallelConfig
    always_off = property(lambda self: False, lambda self, value: None)
    patches.set(config, "deallocate_pipeline_outputs", always_off)


def sequence_parallel_norm(patches: Patches) -> None:
    """Let the plain torch norm run under sequence parallelism, which it refuses
    (torch_norm.py:32).

    Each tensor-parallel rank norms its own part of the sequence, so its weight's
    gradient is a partial sum. The mark ``sequence_parallel``, which Apex's and
    Transformer Engine's norms set, makes ``finalize_model_grads`` all-reduce it over
    the tensor-parallel group.
    """
    norm = importlib.import_module(
        "megatron.core.transformer.torch_norm"
    ).WrappedTorchNorm
    original = norm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        whole = copy.copy(config)
        whole.sequence_parallel = False
        module = original(cls, whole, *args, **kwargs)
        if config.sequence_parallel:
            for parameter in module.parameters():
                parameter.sequence_parallel = True
        return module

    patches.set(norm, "__new__", staticmethod(new))
