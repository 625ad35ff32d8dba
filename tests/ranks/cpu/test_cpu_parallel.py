"""Megatron's own parallel training on gloo ranks equals one process, and the loss
falls.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest

import megatron_muon.cpu as cpu
from megatron_muon.cpu import attention
from support.runs.late_sends import late_sends
from support.runs.training import MODEL, U, differences, rows, trained, truth

pytestmark = pytest.mark.skipif(
    not cpu.enabled(), reason="a GPU is here, so cpu is not enabled"
)

# Ranks and one process differ in fp32 by the order of sums. A sum of up to 260 terms is
# off by about sqrt(260) u = 16 u of its size. In forward and backward of four layers
# about 2 × (4 × 5 + 1) products follow each other, and independent errors add as
# squares: 16 u × sqrt(42) = 105 u.
REDUCTION = 105 * U
DENSE = MODEL
DEEP = replace(MODEL, layers=4)
MOE = replace(MODEL, moe=True, shared=False)
SHARED = replace(MODEL, moe=True)
MTP = replace(MODEL, mtp=True)
MLA = replace(MODEL, mla="column")


# ---------------------------------------------------------------- each parallelism


CASES = {
    "dense": DENSE,
    "experts": MOE,
    "shared experts": SHARED,
    "mla": MLA,
    "mtp": MTP,
    "recompute": replace(MODEL, recompute=True),
}


@pytest.mark.parametrize(
    "name, ranks",
    rows(
        """
        experts: dp2 ep2
        experts: dp2 ep2 alltoall
        experts: cp2 ep2
        shared experts: tp2 ep2 pp2
        shared experts: tp2 ep2 pp2 alltoall
        shared experts: tp2 dp2 ep2 etp2
        shared experts: tp2 dp2 ep2 etp2 alltoall
        dense: cp2
        dense: cp4
        dense: tp2 cp2 pp2
        mla: cp2
        mla: pp2 dp2
        mtp: cp2
        mtp: tp2 dp2
        mtp: pp2
        recompute: tp2 dp2
        """
    ),
)
def test_losses_norms_and_gradients_are_those_of_one_process(
    name: str, ranks: str
) -> None:
    """But for rounding."""
    expected = truth(CASES[name])
    parallel = trained(CASES[name], ranks)
    assert parallel.losses == pytest.approx(expected.losses, rel=REDUCTION)
    assert parallel.norms == pytest.approx(expected.norms, rel=REDUCTION)
    far = {
        name: d for name, d in differences(expected, parallel).items() if d > REDUCTION
    }
    assert not far


@contextmanager
def freeing_what_is_still_sent() -> Iterator[None]:
    """A script's configuration has the schedules free outputs, and a send reads
    late.
    """
    from megatron.core.pipeline_parallel import schedules

    config_of = schedules.get_model_config

    def asking_to_free(model: Any) -> Any:
        config = config_of(model)
        config.deallocate_pipeline_outputs = True
        # waits for no send at all
        config.overlap_p2p_comm_warmup_flush = config.overlap_p2p_comm
        return config

    with late_sends(), mock.patch.object(schedules, "get_model_config", asking_to_free):
        yield


@pytest.mark.parametrize("ranks", ["pp2", "pp2 chunks2", "pp2 chunks2 dp2"])
def test_a_stage_keeps_what_it_sends_until_it_is_sent(ranks: str) -> None:
    """Also where Megatron frees it after isend: its gradients are those of one
    process.
    """
    expected = truth(DEEP)
    parallel = trained(DEEP, ranks, freeing_what_is_still_sent)
    assert parallel.losses == pytest.approx(expected.losses, rel=REDUCTION)
    assert max(differences(expected, parallel).values()) <= REDUCTION


def test_multi_latent_attention_trains_over_tensor_parallel_ranks() -> None:
    """Not compared with one process: with the local spec Megatron does not sum the
    gradient of the keys' positional part over the ranks
    (multi_latent_attention.py:596), on a GPU either.
    """
    trained(MLA, "tp2")


def test_recompute_repeats_the_dropout() -> None:
    plain = replace(MOE, dropout=0.1)
    ranks = "tp2 ep2 alltoall"
    one = trained(plain, ranks)
    other = trained(replace(plain, recompute=True), ranks)
    assert one.losses == other.losses and one.norms == other.norms
    assert set(differences(one, other).values()) == {0.0}
    assert one.losses != trained(replace(plain, dropout=0.0), ranks).losses


# ---------------------------------------------------------------- half precision


@pytest.mark.parametrize("ranks", ["dp2 ep2", "tp2 dp2 ep2 etp2 alltoall"])
def test_grouped_experts_equal_sequential_ones(ranks: str) -> None:
    """In bf16, which the GroupedMLP asks for. The products are the same but for the
    order of fp32 sums, which may turn one rounding to bf16 (2^-9) in each of up to 22
    products in a row.
    """
    sequential = replace(MOE, bf16=True)
    one = trained(sequential, ranks)
    other = trained(replace(sequential, grouped="legacy"), ranks)
    other = replace(other, gradients=by_expert(other.gradients))
    assert other.losses == pytest.approx(one.losses, rel=22 * 2.0**-9)
    assert max(differences(one, other).values()) <= 22 * 2.0**-9


def by_expert(gradients: dict[str, Any]) -> dict[str, Any]:
    """Gradients of a GroupedMLP's batches under the names of SequentialMLP's
    experts.
    """
    of_experts = {}
    for name, grad in gradients.items():
        before, mark, which = name.partition(".experts.weight")
        for expert, part in enumerate(grad) if mark else ():
            of_experts[
                f"{before}.experts.local_experts.{expert}.linear_fc{which}.weight"
            ] = part.T
        if not mark:
            of_experts[name] = grad
    return of_experts


# ---------------------------------------------------------------- the comparison notices


def chunks_in_order() -> Any:
    """Each rank takes its tokens for neighbours, so masks and keys are out of place."""
    return mock.patch.object(
        attention, "chunks", lambda size, rank: (2 * rank, 2 * rank + 1)
    )


def keys_without_the_others_gradient() -> Any:
    """The gathered keys' gradient is cut, not summed."""
    from megatron.core.tensor_parallel import mappings

    gather = mappings.gather_from_sequence_parallel_region
    cut = partial(gather, tensor_parallel_output_grad=False)
    return mock.patch.object(mappings, "gather_from_sequence_parallel_region", cut)


@pytest.mark.parametrize(
    "mutation", [chunks_in_order, keys_without_the_others_gradient]
)
def test_mutants_of_the_context_parallel_attention_are_noticed(mutation: Any) -> None:
    mutant = trained(DENSE, "cp2", mutation)
    worst = max(differences(truth(DENSE), mutant).values())
    assert worst > 100 * REDUCTION
