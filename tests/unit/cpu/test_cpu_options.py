"""Options that only a GPU can run: what stands in for them on a CPU, and one error for
the rest.
"""

from __future__ import annotations

from argparse import Namespace
from enum import Enum

import pytest

from megatron_muon.cpu.options import REFUSED, refuse, replace

Attention = Enum("Attention", ["flash", "unfused", "auto"])


@pytest.fixture(autouse=True)
def _with_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def of_a_gpu() -> Namespace:
    """What Megatron's parser makes of a plain command line, and two options given."""
    return Namespace(
        distributed_backend="nccl",
        transformer_impl="transformer_engine",
        no_persist_layer_norm=False,
        gradient_accumulation_fusion=True,
        masked_softmax_fusion=True,
        apply_rope_fusion=True,
        moe_permute_fusion=True,
        attention_backend=Attention.flash,
        bias_gelu_fusion=True,
    )


def test_what_runs_on_a_cpu_stays_and_what_a_version_lacks_is_not_made() -> None:
    args = Namespace(distributed_backend="gloo", attention_backend=Attention.auto)
    assert replace(args) == []
    assert vars(args) == {
        "distributed_backend": "gloo",
        "attention_backend": Attention.auto,
    }


def test_megatrons_variable_is_set_where_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    (line,) = replace(Namespace())
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in line
    assert replace(Namespace()) == []
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert replace(Namespace()) == []


def test_what_cannot_run_is_one_error_with_what_to_write_for_each() -> None:
    args = of_a_gpu()
    args.fp8, args.tp_comm_overlap, args.cuda_graph_impl = "hybrid", True, "local"
    args.moe_token_dispatcher_type, args.high_priority_stream_groups = "flex", ["tp"]
    with pytest.raises(ValueError) as caught:
        refuse(args)
    first, *rest = str(caught.value).splitlines()
    assert "5 of the given options cannot" in first
    assert [line.split(" (")[0].strip() for line in rest] == [
        "--fp8-format hybrid",
        "--cuda-graph-impl local",
        "--tp-comm-overlap",
        "--moe-token-dispatcher-type flex",
        "--high-priority-stream-groups",
    ]
    assert rest[1].endswith(": --cuda-graph-impl none")
    assert rest[3].endswith(": --moe-token-dispatcher-type alltoall")
    assert all(row.why and row.instead for row in REFUSED)


def test_defaults_are_not_refused() -> None:
    defaults = {row.dest: False for row in REFUSED} | {
        "fp8": None,
        "cuda_graph_impl": "none",
        "cross_entropy_fusion_impl": "native",
        "moe_token_dispatcher_type": "allgather",
        "transformer_impl": "transformer_engine",
        "high_priority_stream_groups": [],
    }
    refuse(Namespace(**defaults))
    refuse(Namespace())
