"""The parts of the CPU's attention and experts, each by itself."""

from typing import Any

import numpy
import pytest
import torch

import megatron_muon.cpu as cpu
from megatron_muon.cpu import attention, experts
from support.models.gpt_model import transformer_config
from support.ranks import RankError, run
from support.runs.cases import GROUPS, HEAD_SIZE, HEADS
from support.runs.cases import SEQUENCE as LENGTH
from support.runs.training import MODEL, SEQUENCES, spread

Array = Any
U = 2.0**-24  # fp32 unit roundoff
pytestmark = pytest.mark.skipif(not cpu.enabled(), reason="a GPU is here, so cpu is not enabled")


def _attend(cp_size: int, given: str, causal: bool) -> list[Array]:
    """Output and gradients of the queries, keys and values of this rank's part, fp32."""
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    ps.initialize_model_parallel(context_parallel_size=cp_size)
    model_parallel_cuda_manual_seed(1)
    kind = AttnMaskType.causal if causal else AttnMaskType.padding
    core = DotProductAttention(transformer_config(MODEL, spread(cp=cp_size)), 1, kind, "self")
    mine = attention.positions(LENGTH, cp_size, ps.get_context_parallel_rank())
    g = torch.Generator().manual_seed(5)
    q, k, v, weight = (
        torch.randn(LENGTH, SEQUENCES, heads, HEAD_SIZE, generator=g)[mine]
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    mask = torch.rand(SEQUENCES, 1, LENGTH, LENGTH, generator=g) < 0.3
    masks = {"none": None, "whole": mask, "cut": mask[:, :, mine], "keys": mask[:, :, :1]}
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = core(q, k, v, masks[given])
    (out * weight.flatten(2)).sum().backward()
    return [mine.numpy(), *(t.detach().numpy() for t in (out, q.grad, k.grad, v.grad))]


@pytest.mark.parametrize(
    ("given", "causal"),
    [("none", True), ("none", False), ("whole", False), ("cut", True), ("keys", False)],
)
def test_attention_over_parts_of_the_sequence(given: str, causal: bool) -> None:
    """With grouped queries and each form of mask. Sums of up to 32 terms in 5 products."""
    _, *expected = run(_attend, 1, 1, given, causal)[0]
    parts = run(_attend, 2, 2, given, causal)
    for i, whole in enumerate(expected, 1):
        joined = numpy.empty_like(whole)
        for part in parts:
            joined[part[0]] = part[i]
        bound = 5 * 32 * U * numpy.linalg.norm(whole)
        assert numpy.linalg.norm(joined - whole) <= bound


def test_positions_are_those_of_megatrons_batches() -> None:
    assert attention.positions(12, 2, 0).tolist() == [0, 1, 2, 9, 10, 11]
    assert attention.positions(12, 3, 1).tolist() == [2, 3, 8, 9]
    with pytest.raises(ValueError, match="multiple of 4"):
        attention.positions(10, 2, 0)


def _refused(what: str) -> None:
    from megatron.core import parallel_state as ps
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    ps.initialize_model_parallel(context_parallel_size=2)
    config = transformer_config(MODEL, spread(cp=2))
    config.window_size = (4, 0) if what == "window_size" else None
    core = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    q, k = torch.ones(8, 1, HEADS, 16), torch.ones(4 if what == "keys" else 8, 1, GROUPS, 16)
    core(q, k, k, torch.ones(1, 1, 8, 8).bool() if what == "attention_mask" else None)


@pytest.mark.parametrize("what", ["window_size", "keys", "attention_mask"])
def test_attention_refuses_what_it_does_not_do(what: str) -> None:
    with pytest.raises(RankError, match=f"Error: .*{what}"):
        run(_refused, 2, what)


def _uneven(sizes: tuple[int, ...]) -> tuple[Array, Array, Array, Array]:
    """A gather of parts of these sizes and its gradient, and the same of a reduce-scatter."""
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import mappings

    ps.initialize_model_parallel(len(sizes))
    rank, total, parts = ps.get_tensor_model_parallel_rank(), sum(sizes), list(sizes)
    mine = torch.full((sizes[rank], 2), float(rank + 1), requires_grad=True)
    whole = mappings.gather_from_sequence_parallel_region(mine, output_split_sizes=parts)
    (whole * (torch.arange(total)[:, None] + 100.0 * rank)).sum().backward()
    rows = (torch.arange(2.0 * total).view(total, 2) * (rank + 1)).requires_grad_()
    part = mappings.reduce_scatter_to_sequence_parallel_region(rows, input_split_sizes=parts)
    (part * (rank + 1)).sum().backward()
    return tuple(t.detach().numpy() for t in (whole, mine.grad, part, rows.grad))  # type: ignore


@pytest.mark.parametrize("sizes", [(3, 1), (0, 2), (2, 2), (0, 0)], ids=str)
def test_uneven_parts(sizes: tuple[int, ...]) -> None:
    """Small integers, so exact: every sum of two ranks is 1 + 2 = 3 times the first's."""
    total, edge = sum(sizes), sizes[0]
    owner = numpy.array([1.0] * sizes[0] + [2.0] * sizes[1])[:, None].repeat(2, 1)
    index = numpy.arange(float(total))[:, None].repeat(2, 1)
    rows = numpy.arange(2.0 * total).reshape(total, 2)
    for rank, (whole, mine_grad, part, rows_grad) in enumerate(run(_uneven, 2, sizes)):
        own = slice(edge) if rank == 0 else slice(edge, None)
        assert numpy.array_equal(whole, owner)
        assert numpy.array_equal(mine_grad, (2 * index + 100)[own])
        assert numpy.array_equal(part, 3 * rows[own])
        assert numpy.array_equal(rows_grad, owner)


@pytest.mark.parametrize("trans_b", [False, True])
def test_grouped_products(trans_b: bool) -> None:
    g = torch.Generator().manual_seed(2)
    a = torch.randn(7, 3, generator=g, dtype=torch.float64, requires_grad=True)
    shape = (4, 5, 3) if trans_b else (4, 3, 5)
    b = torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)
    sizes = torch.tensor([2, 0, 4, 1])
    matrices = b.transpose(1, 2) if trans_b else b
    expert = [0, 0, 2, 2, 2, 2, 3]
    expected = torch.stack([a[row] @ matrices[e] for row, e in enumerate(expert)])
    assert torch.allclose(experts.gmm(a, b, sizes, trans_b), expected, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x, y: experts.gmm(x, y, sizes, trans_b), (a, b))
    experts.gmm(a, b, sizes, trans_b).sum().backward()
    assert b.grad is not None and torch.equal(b.grad[1], torch.zeros_like(b.grad[1]))
