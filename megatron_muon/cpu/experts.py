"""Replacements for mixture-of-experts layers: the router, the token exchange, grouped
products.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_muon.runtime.patches import Function, Patches


def router(patches: Patches) -> None:
    """The router's product is torch's: moe_utils.py:1192 tests a name that only an
    import sets.

    Since core 0.17 it is None without Transformer Engine, and core 0.12 has no such
    product.
    """
    module = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if hasattr(module, "RouterGatingLinearFunction"):
        patches.add(module, "te_general_gemm", None)


def _moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's ``maybe_move_tensor_to_cpu``, for tensors that are there already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def split_sizes(patches: Patches) -> None:
    """Counts that a GPU run fetches as numpy arrays become numpy arrays here too.

    The all-to-all (mappings.py:444) cannot take sizes as CPU tensors.
    """
    for name in ("moe_utils", "token_dispatcher"):
        module = importlib.import_module(f"megatron.core.transformer.moe.{name}")
        patches.set(module, "maybe_move_tensor_to_cpu", _moved)


def _padded(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat(
        [tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])]
    )


def _or_tensor_parallel(group: Any) -> Any:
    """The group; core 0.12 passes None for that of tensor parallelism."""
    if group is not None:
        return group
    state = importlib.import_module("megatron.core.parallel_state")
    return state.get_tensor_model_parallel_group()


def uneven_parts(patches: Patches) -> None:
    """Gather and reduce-scatter parts of different lengths, padded to the longest.

    gloo needs equal parts; with the alltoall dispatcher over expert tensor parallelism
    ranks have different numbers of tokens (mappings.py:150, 194).
    """
    module = importlib.import_module("megatron.core.tensor_parallel.mappings")
    for name, uneven in _UNEVEN.items():
        patches.set(module, name, partial(uneven, getattr(module, name)))


def _gather(
    original: Function,
    input_: Any,
    group: Any = None,
    output_split_sizes: Any = None,
    use_global_buffer: bool = False,
) -> Any:
    group = _or_tensor_parallel(group)
    if _are_even(group, output_split_sizes):
        return original(input_, group, None, use_global_buffer)
    longest = max(output_split_sizes)
    parts = original(_padded(input_, longest), group).split(longest)
    pairs = zip(parts, output_split_sizes, strict=True)
    return torch.cat([part[:rows] for part, rows in pairs])


def _reduce_scatter(
    original: Function,
    input_: Any,
    group: Any = None,
    input_split_sizes: Any = None,
    use_global_buffer: bool = False,
) -> Any:
    group = _or_tensor_parallel(group)
    if _are_even(group, input_split_sizes):
        return original(input_, group, None, use_global_buffer)
    sizes = list(input_split_sizes)
    parts = [_padded(part, max(sizes)) for part in input_.split_with_sizes(sizes)]
    return original(torch.cat(parts), group)[: sizes[group.rank()]]


def _are_even(group: Any, sizes: Any) -> bool:
    return sizes is None or len(set(sizes)) == 1 or group.size() == 1


_UNEVEN = {
    "_gather_along_first_dim": _gather,
    "_reduce_scatter_along_first_dim": _reduce_scatter,
}


def gmm(
    a: Tensor,
    b: Tensor,
    batch_sizes: Tensor | Sequence[int],
    trans_b: bool = False,
) -> Tensor:
    """One product for each expert, over its own rows of ``a``, as grouped_gemm's
    ``ops.gmm``.

    ``a`` is [rows, k], sorted by expert; ``b`` [experts, k, n], or [experts, n, k] with
    ``trans_b``; the result [rows, n]. Every expert's matrix gets a gradient, also
    without rows.
    """
    rows = a.split_with_sizes([int(size) for size in batch_sizes])
    if trans_b:
        b = b.transpose(1, 2)
    return torch.cat(
        [part @ matrix for part, matrix in zip(rows, b.unbind(0), strict=True)]
    )


def grouped_gemm(patches: Patches) -> None:
    """Stand in for the CUDA package grouped_gemm, of which Megatron takes ``ops.gmm``.

    The legacy GroupedMLP has its products from there (grouped_gemm_util.py:16).
    Core 0.17 dropped the legacy GroupedMLP, and its last users of the package with it.
    """
    name = "megatron.core.transformer.moe.grouped_gemm_util"
    if importlib.util.find_spec(name) is None:
        return
    module = importlib.import_module(name)
    ops = SimpleNamespace(gmm=gmm)
    patches.set_all(module, grouped_gemm=SimpleNamespace(ops=ops), ops=ops)
