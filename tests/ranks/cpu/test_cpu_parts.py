"""The CPU's attention by itself: over parts of the sequence, and what it refuses."""

from typing import Any

import numpy
import pytest
import torch

import megatron_muon.cpu as cpu
from megatron_muon.cpu import attention
from support.models.gpt_model import transformer_config
from support.ranks import RankError, run
from support.runs.cases import GROUPS, HEAD_SIZE, HEADS
from support.runs.cases import SEQUENCE as LENGTH
from support.runs.training import MODEL, SEQUENCES, spread

U = 2.0**-24  # fp32 unit roundoff
pytestmark = pytest.mark.skipif(not cpu.enabled(), reason="a GPU is here, so cpu is not enabled")


def _attend(cp_size: int, given: str, causal: bool) -> list[Any]:
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


def test_dropout_is_the_same_where_one_tp_rank_alone_reads_data() -> None:
    before = torch.cuda.get_rng_state()
    assert list(torch.utils.data.DataLoader([1, 2])) == [1, 2]
    assert torch.equal(torch.cuda.get_rng_state(), before)
