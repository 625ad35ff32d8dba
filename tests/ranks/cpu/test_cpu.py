"""Megatron without a GPU: the switch, half-precision products, Adam, attention over
parts.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import megatron_muon.cpu as cpu
from megatron_muon.cpu import attention
from megatron_muon.cpu.fused_adam import FusedAdam
from megatron_muon.orthogonalize.matmul import multiplies_bf16
from support.models.gpt_model import transformer_config
from support.processes import printed
from support.ranks import RankError, run
from support.runs.cases import GROUPS, HEAD_SIZE, HEADS, Topology
from support.runs.cases import SEQUENCE as LENGTH
from support.runs.spawned_child import seen
from support.runs.training import MODEL, SEQUENCES

needs_products = pytest.mark.skipif(
    multiplies_bf16(), reason="this CPU has bf16 instructions; nothing is replaced"
)
pytestmark = pytest.mark.skipif(
    not cpu.enabled(), reason="a GPU is here, so cpu is not enabled"
)

# ---------------------------------------------------------------- the switch


def test_enable_refuses_once_megatron_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import megatron.core  # noqa: F401

    cpu.enable()  # enabled already: nothing happens
    monkeypatch.setattr(cpu, "_patches", cpu.Patches())
    with pytest.raises(RuntimeError, match="before anything imports Megatron"):
        cpu.enable()


def test_import_is_light_and_enable_refuses_a_gpu() -> None:
    out = printed(
        *("-W", "ignore", "-c"),
        "import sys, torch, megatron_muon.cpu as cpu\n"
        "assert not any(m.startswith('megatron.') for m in sys.modules)\n"
        "torch.cuda.is_available = lambda: True\n"
        "try: cpu.enable()\n"
        "except RuntimeError as e: print(e)\n"
        "assert not cpu.enabled()\n"
        "cpu.enable(allow_cuda=True)\n"
        "print(cpu.enabled(), torch.zeros(1, device='cuda').device)\n",
    )
    assert "allow_cuda=True" in out and "True cpu" in out


ROUND_TRIP = """
import torch, torch.cuda.nvtx, itertools, multiprocessing.process
import megatron_muon.cpu as cpu
OWNERS = [torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor,
          torch.distributed.ProcessGroup, torch.distributed.ProcessGroupGloo,
          torch.utils.data.DataLoader, multiprocessing.process.BaseProcess]
OPS = ["aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"]
def state(): return [dict(vars(o)) for o in OWNERS]
def kernels(): return [torch._C._dispatch_dump(op) for op in OPS]
def products():
    out = []
    for dtype, n, transposed in itertools.product(
        (torch.float32, torch.float64, torch.int64, torch.complex64), (0, 1, 5, 67), (0, 1)):
        g = torch.Generator().manual_seed(n)
        a, b = torch.randn(2, 3, n, n, generator=g, dtype=torch.float64).mul(9).to(dtype)
        c = b.transpose(1, 2) if transposed else b
        out += [a[0] @ c[0], a @ c, torch.addmm(b[1], a[0], c[0], beta=2, alpha=3),
                torch.baddbmm(b, a, c, beta=2, alpha=3), torch.addmm(b[1, :1], a[0], c[0])]
    return out
def same(x, y): return all(torch.equal(p, q) and p.stride() == q.stride() for p, q in zip(x, y))
before, table, values = state(), kernels(), products()
absent, changed, add = object(), [], cpu.Patches.add
def recorded(patches, owner, name, value):
    changed.append((owner, name, vars(owner).get(name, absent)))
    add(patches, owner, name, value)
cpu.Patches.add = recorded
cpu.enable()
import megatron.core.optimizer as o, megatron.core.optimizer.distrib_optimizer as d
from megatron.core.transformer.torch_norm import WrappedTorchNorm as W
import megatron.core.tensor_parallel.random as r
assert torch.zeros(1, device="cuda", pin_memory=True).type() == "torch.cuda.FloatTensor"
assert o.Adam is d.Adam is cpu.FusedAdam and not getattr(o, "USING_PYTORCH_OPTIMIZER", False)
assert d.HAVE_APEX_OR_TE and getattr(d, "USING_TE_OPTIMIZER", True)  # since 0.14, as the first's
assert same(values, products())
half = kernels()
assert matmul_is_native or all(x != y for x, y in zip(half, table))
megatron_patches = [(w, n, v) for w, n, v in changed if w not in OWNERS]
cpu.disable()
for owner, old in zip(OWNERS, before):
    for name in old: assert vars(owner)[name] is old[name], (owner, name)
    new = {n for n in vars(owner) if n not in old and not hasattr(vars(owner)[n], "__path__")}
    assert not new & {"cuda", "to", "type", "pin_memory", "record_stream"}, (owner, new)
assert kernels() == table and same(values, products())
assert o.Adam is torch.optim.AdamW and getattr(o, "USING_PYTORCH_OPTIMIZER", True) is True
assert d.Adam in (torch.optim.Adam, torch.optim.AdamW)
assert d.HAVE_APEX_OR_TE is getattr(d, "USING_TE_OPTIMIZER", False) is False
import megatron.core.transformer.multi_latent_attention as l
import megatron.core.tensor_parallel.mappings as m
from megatron.core.transformer.dot_product_attention import DotProductAttention as A
import importlib.util, inspect, megatron.core.fp8_utils as f
from megatron.core.model_parallel_config import ModelParallelConfig as C
import megatron.core.transformer.moe.moe_utils as u
import megatron.core.transformer.moe.token_dispatcher as t
expected = {o, d, r, W, A, C, m, u, t}
expected |= {l} if hasattr(l, "HAVE_TE") else set()  # since core 0.14
cast = f._quantize_param_shard_impl  # of core 0.12, which raises
expected |= set() if "model_params" in inspect.signature(cast).parameters else {f}
if importlib.util.find_spec("megatron.core.transformer.moe.grouped_gemm_util"):  # until 0.16
    expected.add(importlib.import_module("megatron.core.transformer.moe.grouped_gemm_util"))
assert {w for w, _, _ in megatron_patches} == expected
for owner, name, old in reversed(megatron_patches):  # the value before the first change counts
    first = next(v for w, n, v in megatron_patches if (w, n) == (owner, name))
    if first is absent: assert name not in vars(owner), (owner, name)
    else: assert vars(owner)[name] is first, (owner, name)
assert torch.zeros(1).type() == "torch.FloatTensor"
cpu.disable()
print("as before")
"""


def test_disable_puts_everything_back_and_other_types_are_bitwise_unchanged() -> None:
    native = f"matmul_is_native = {multiplies_bf16()}\n"
    assert printed("-W", "ignore", "-c", native + ROUND_TRIP) == "as before\n"


def test_a_spawned_process_has_one_device_and_no_megatron() -> None:
    """Megatron's persistent writer of checkpoints divides by the number of devices."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        asked = pool.submit(seen)
        assert asked.result(timeout=100) == (1, "cpu", False)


def _polling() -> int:
    """Threads of gloo devices with four process groups."""
    for _ in range(3):
        torch.distributed.new_group([0, 1])
    names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop\n")


def test_all_groups_of_a_rank_have_one_gloo_device() -> None:
    assert run(_polling, 2) == [1, 1]


# ---------------------------------------------------------------- half-precision products


@needs_products
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_products_are_fp32_products_rounded_once(dtype: torch.dtype) -> None:
    a, b, c = (torch.randn(3, 17, 17).to(dtype) for _ in range(3))
    A = a.float()
    B = b.float()
    C = c.float()
    assert torch.equal(a[0] @ b[0].t(), (A[0] @ B[0].t()).to(dtype))
    assert torch.equal(a @ b, (A @ B).to(dtype))
    got = torch.addmm(c[0], a[0], b[0], beta=0.5, alpha=2.0)
    assert got.dtype is dtype
    assert torch.equal(
        got, torch.addmm(C[0], A[0], B[0], beta=0.5, alpha=2.0).to(dtype)
    )
    got = torch.baddbmm(c, a, b, beta=0.5, alpha=2.0)
    assert torch.equal(got, torch.baddbmm(C, A, B, beta=0.5, alpha=2.0).to(dtype))
    # Megatron hands an uninitialised buffer with beta=0
    nan = torch.full_like(c, float("nan"))
    assert torch.equal(
        torch.baddbmm(nan, a, b, beta=0.0, alpha=0.5), ((A @ B) * 0.5).to(dtype)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_flops_are_counted_once(dtype: torch.dtype) -> None:
    a = torch.randn(2, 8, 16).to(dtype)
    b = torch.randn(2, 16, 4).to(dtype)
    with FlopCounterMode(display=False) as counter:
        _ = a[0] @ b[0]
        _ = a @ b
        torch.addmm(torch.zeros(4, dtype=dtype), a[0], b[0])
        torch.baddbmm(torch.zeros(4, dtype=dtype), a, b)
    assert counter.get_total_flops() == (1 + 2 + 1 + 2) * 2 * 8 * 16 * 4


# ---------------------------------------------------------------- FusedAdam


def test_step_is_an_int_in_each_group() -> None:
    a = torch.nn.Parameter(torch.ones(3))
    b = torch.nn.Parameter(torch.ones(2, 2).bfloat16())
    optimizer = FusedAdam([{"params": [a, b]}, {"params": []}], lr=0.1)
    a.grad = torch.ones(3)
    for _ in range(2):
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]
    # no gradient: state, no move
    assert torch.equal(b.detach(), torch.ones(2, 2).bfloat16())
    assert set(optimizer.state[b]) == {"exp_avg", "exp_avg_sq"}
    assert optimizer.state[b]["exp_avg"].dtype is torch.float32


U = 2.0**-24  # fp32 unit roundoff


def _attend(cp_size: int, given: str, causal: bool) -> list[Any]:
    """Output and gradients of the queries, keys and values of this rank's part,
    fp32.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    ps.initialize_model_parallel(context_parallel_size=cp_size)
    model_parallel_cuda_manual_seed(1)
    kind = AttnMaskType.causal if causal else AttnMaskType.padding
    core = DotProductAttention(
        transformer_config(MODEL, Topology(cp=cp_size)), 1, kind, "self"
    )
    mine = attention.positions(LENGTH, cp_size, ps.get_context_parallel_rank())
    g = torch.Generator().manual_seed(5)
    q, k, v, weight = (
        torch.randn(LENGTH, SEQUENCES, heads, HEAD_SIZE, generator=g)[mine]
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    mask = torch.rand(SEQUENCES, 1, LENGTH, LENGTH, generator=g) < 0.3
    masks = {
        "none": None,
        "whole": mask,
        "cut": mask[:, :, mine],
        "keys": mask[:, :, :1],
    }
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = core(q, k, v, masks[given])
    (out * weight.flatten(2)).sum().backward()
    return [mine.numpy(), *(t.detach().numpy() for t in (out, q.grad, k.grad, v.grad))]


@pytest.mark.parametrize(
    "given, causal",
    [("none", True), ("none", False), ("whole", False), ("cut", True), ("keys", False)],
)
def test_attention_over_parts_of_the_sequence(given: str, causal: bool) -> None:
    """With grouped queries and each form of mask. Sums of up to 32 terms in 5
    products.
    """
    _, *expected = run(_attend, 1, 1, given, causal)[0]
    parts = run(_attend, 2, 2, given, causal)
    for i, whole in enumerate(expected, 1):
        joined = numpy.empty_like(whole)
        for part in parts:
            joined[part[0]] = part[i]
        bound = 5 * 32 * U * numpy.linalg.norm(whole)
        assert numpy.linalg.norm(joined - whole) <= bound


def _refused(what: str) -> None:
    from megatron.core import parallel_state as ps
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    ps.initialize_model_parallel(context_parallel_size=2)
    config = transformer_config(MODEL, Topology(cp=2))
    config.window_size = (4, 0) if what == "window_size" else None
    core = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    q = torch.ones(8, 1, HEADS, 16)
    k = torch.ones(4 if what == "keys" else 8, 1, GROUPS, 16)
    core(q, k, k, torch.ones(1, 1, 8, 8).bool() if what == "attention_mask" else None)


@pytest.mark.parametrize("what", ["window_size", "keys", "attention_mask"])
def test_attention_refuses_what_it_does_not_do(what: str) -> None:
    with pytest.raises(RankError, match=f"Error: .*{what}"):
        run(_refused, 2, what)


def test_dropout_is_the_same_where_one_tp_rank_alone_reads_data() -> None:
    before = torch.cuda.get_rng_state()
    assert list(torch.utils.data.DataLoader([1, 2])) == [1, 2]
    assert torch.equal(torch.cuda.get_rng_state(), before)
