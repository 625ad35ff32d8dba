"""Bad input: one clear error each, on every rank, before anything is trained on."""

from __future__ import annotations

import ast
import re
import traceback
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import __version__ as VERSION
from megatron.core.optimizer import OptimizerConfig

from megatron_muon.orthogonalize.numerics import Device, Numerics
from support.installed import VERSION as MINOR
from support.installed import installed
from support.models.gpt import Case, Topology, build, error_of_optimizer, start
from support.ranks import error_of, run
from support.runs.topologies import DP2, DP3, DP4_INSTANCES2, ONE, PP2, TP2_PP2_DP2

CASE = Case(layers=2, steps=1)


def _error_of_building(case: Case, topology: Topology, changes: dict[str, Any]) -> str:
    """Change attributes of the configs, then ask for the optimizer; the error as
    text.
    """
    from megatron.core import optimizer as mcore_optimizer

    built = build(case, topology)
    own = {"use_distributed_optimizer": True, **changes.get("optimizer", {})}
    config = mcore_optimizer.OptimizerConfig(
        **{"optimizer": "muon", "lr": 0.01, "bf16": True, **own},
        params_dtype=case.dtype,
    )
    changed = {
        "late": config,
        "ddp": built.ddp.ddp_config,
        "model": built.ddp.module.config,
        "mark": next(iter(built.params.values())),
    }
    for kind, holder in changed.items():
        vars(holder).update(changes.get(kind, {}))

    def forbidden(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            agree = ("raise_together", "agree_on_settings")  # so it ends on all ranks
            if any(frame.name in agree for frame in traceback.extract_stack()):
                return originals[name](*args, **kwargs)
            raise AssertionError(f"{name} called before the error")

        return call

    collectives = ("all_", "reduce", "broadcast")
    originals = {n: f for n, f in vars(dist).items() if n.startswith(collectives)}
    overrides = _overrides(changes)
    with installed(), mock.patch.multiple(dist, **{n: forbidden(n) for n in originals}):
        make = mcore_optimizer.get_megatron_optimizer
        return error_of(lambda: make(config, [built.ddp], **overrides))


def _overrides(changes: dict[str, Any]) -> dict[str, Any]:
    """The argument of core 0.16 and later that asks for the optimizer of some
    weights.
    """
    if "override" not in changes:
        return {}
    from megatron.core.optimizer.optimizer_config import ParamKey

    return {"config_overrides": {ParamKey(name="*.linear_fc1.*"): changes["override"]}}


# What is set, of which config, and what the error says.
UNSUPPORTED = {
    "optimizer.use_distributed_optimizer=False": (
        "ValueError: optimizer='muon' shards over Megatron's distributed optimizer, "
        "but OptimizerConfig.use_distributed_optimizer is False: set it in "
    ),
    "ddp.use_distributed_optimizer=False": (
        "DistributedDataParallelConfig.use_distributed_optimizer is False: set it in "
    ),
    "optimizer.decoupled_weight_decay=False": (
        "ValueError: optimizer='muon' decays weights as AdamW does: set "
        "decoupled_weight_decay"
    ),
    "late.optimizer='Muon'": "ValueError: write optimizer='muon', got 'Muon'",
    # its __post_init__ wants FusedAdam
    "late.use_precision_aware_optimizer=True": (
        "use_precision_aware_optimizer here: Megatron has picked megatron_muon.cpu"
    ),
    "late.optimizer_cuda_graph=True": (
        "does not support optimizer_cuda_graph yet (got True): leave it off"
    ),
    # one of an older branch dev
    "late.optimizer_cpu_offload=True late.offload_optimizer_states=True": (
        "offload_optimizer_states yet (got True): use optimizer_cpu_offload with "
        "use_precision_aware_optimizer, which moves state by round, or choose "
        "optimizer='adam' (--optimizer adam)\n"
        "optimizer='muon' does not support optimizer_cpu_offload without "
        "use_precision_aware"
    ),
    "ddp.use_megatron_fsdp=True": "support use_megatron_fsdp yet",
    "model.fp8='e4m3' model.fp8_param=True model.fp8_recipe='custom'": (
        "does not support fp8_param_gather"
    ),
    "model.fp4_param=True": "does not support fp4_param yet",
    "mark.is_gtp_weight_remat=True": "does not support generalized tensor parallelism yet",
    "model.moe_single_grouped_weight=True": (
        "does not support moe_single_grouped_weight yet (got True): keep a weight per "
        "expert"
    ),
    "model.moe_single_grouped_bias=True": (
        "does not support moe_single_grouped_bias yet (got True): keep a bias per "
        "expert"
    ),
    "optimizer.overlap_param_gather_with_optimizer_step=True optimizer.fp16=True optimizer.bf16=False": (
        "overlap_param_gather_with_optimizer_step in fp16 yet (got True): use "
        "overlap_param_gather"
    ),
    "optimizer.overlap_param_gather_with_optimizer_step=True model.num_moe_experts=4": (
        "support overlap_param_gather_with_optimizer_step with experts yet"
    ),
    # experts that drift
    "model.num_moe_experts=4 model.expert_tensor_parallel_size=2": (
        "expert_tensor_parallel_size other than tensor_model_parallel_size without "
        "expert parallelism yet (got 2): set expert_model_parallel_size above 1"
    ),
    # Megatron's name where it has no Muon
    "late.optimizer='dist_muon'": "ValueError: write optimizer='muon', got 'dist_muon'",
    "optimizer.adaptive_muon_beta2=0.9": (
        "OptimizerConfig.adaptive_muon_beta2: Megatron's adaptive_muon is no rule of"
    ),
    "late.optimizer='adaptive_muon'": (
        "give --optimizer muon with --muon-rule normuon or namo (MuonConfig(rule='nor"
    ),
    "late.use_layer_wise_distributed_optimizer=True": (
        "does not support use_layer_wise_distributed_optimizer yet (got True): delete "
        "that line"
    ),
    "override.optimizer='lion'": (
        "ValueError: config_overrides asks for the optimizer 'lion' of ParamKey(name="
    ),
}


def _changes(text: str) -> dict[str, dict[str, Any]]:
    """Settings by their config, of ``CONFIG.SETTING=VALUE`` each."""
    changes: dict[str, dict[str, Any]] = {}
    for kind, name, value in re.findall(r"(\w+)\.(\w+)=(\S+)", text):
        changes.setdefault(kind, {})[name] = ast.literal_eval(value)
    return changes


@pytest.mark.parametrize("text", UNSUPPORTED)
def test_an_unsupported_mode_is_refused_before_any_collective(text: str) -> None:
    changes = _changes(text)
    new = (
        changes.get("optimizer", {}).keys()
        - OptimizerConfig.__dataclass_fields__.keys()
    )
    if new:
        pytest.skip(
            f"OptimizerConfig of megatron-core {VERSION} has no {', '.join(new)}"
        )
    if "dist_muon" in text and MINOR >= (0, 16):
        pytest.skip("there it is the plugin's")
    if "'adaptive_muon'" in text and MINOR < (0, 16):
        pytest.skip("there it is no name of Megatron's")
    if "override" in changes and MINOR < (0, 16):
        pytest.skip("config_overrides came with core 0.16")
    for error in run(_error_of_building, 2, CASE, DP2, changes):
        assert UNSUPPORTED[text] in error, error


class _Fsdp2(torch.nn.Module):
    """What get_megatron_optimizer needs of a chunk, as torch FSDP2's wrapper has it."""

    def __init__(self, ddp: Any) -> None:
        super().__init__()
        self.ddp_config, self.config, self.module = (
            ddp.ddp_config,
            ddp.config,
            ddp.module,
        )


def _error_with_another_wrapper() -> str:
    from megatron.core import optimizer as mcore_optimizer

    chunk = _Fsdp2(build(CASE, ONE).ddp)
    config = mcore_optimizer.OptimizerConfig(
        optimizer="muon", lr=0.1, use_distributed_optimizer=True
    )
    with installed():
        return error_of(lambda: mcore_optimizer.get_megatron_optimizer(config, [chunk]))


def test_a_chunk_without_megatrons_ddp_is_refused() -> None:
    (text,) = run(_error_with_another_wrapper, 1)
    assert text.startswith("NotImplementedError: ")
    assert "does not support _Fsdp2 yet: wrap model chunks in Megatron's" in text


def _disagree(topology: Topology, kind: str) -> str:
    """The last rank differs; every rank must get an error."""
    from megatron_muon.mcore.wiring import build as plugin

    built = build(CASE, topology)
    odd = dist.get_rank() == dist.get_world_size() - 1
    settings: dict[str, Any] = {}
    if odd and kind == "routing":  # as if a checkout of another version marked it
        name = next(n for n in built.params if n.endswith("linear_fc2.weight"))
        built.params[name].is_embedding_or_output_parameter = True
    if odd and kind == "shape":
        built.ddp.module.module.config.num_query_groups = 4
    if kind == "instances" and dist.get_rank() >= dist.get_world_size() // 2:
        settings = {"momentum": 0.9}
    numerics_on = plugin.numerics_on
    if kind.startswith("device"):  # a CPU that does not multiply bf16 among such as do
        settings = (
            {"split_matrices": 2} if "squares" in kind else {"ns_iteration": "auto"}
        )
        device: Device = "cpu" if odd else "cpu_bf16"
        numerics_on = lambda _, config: Numerics(config, device)  # noqa: E731
    with mock.patch.object(plugin, "numerics_on", numerics_on):
        return error_of_optimizer(built, **settings)


@pytest.mark.parametrize(
    "kind, named", [("routing", "linear_fc2.weight"), ("shape", "decoder.layers")]
)
@pytest.mark.parametrize("topology", [DP3, TP2_PP2_DP2], ids=str)
def test_ranks_that_disagree_all_get_an_error_that_names_the_difference(
    topology: Topology, kind: str, named: str
) -> None:
    texts = run(_disagree, topology.world_size, topology, kind, timeout=60.0)
    last_stage = texts[-(len(texts) // topology.pp) :]
    for text in texts:
        assert "ranks disagree, first at" in text or "cannot split it" in text, text
    for text in last_stage[:-1]:
        # of the rank that cannot, before a plan is compared
        if "cannot split it" in text:
            assert text.startswith(
                f"RuntimeError: rank {len(texts) - 1} stopped this run: {named}"
            )
            continue
        assert text.startswith("PlanMismatchError"), text
        assert named in text.split("first at ")[1].split("\n")[0]
        assert kind != "shape" or "cannot split it, set split_qkv=False" in text


@pytest.mark.parametrize(
    "kind, topology, named",
    [
        (
            "instances",
            DP4_INSTANCES2,
            "setting momentum: rank 2 has 0.9",
        ),
        ("instances", PP2, "setting momentum"),  # of two stages
        ("device", DP2, "kind of device: rank 1 has"),
        ("device of squares", DP2, "kind of device: rank 1 has"),
    ],
    ids=str,
)
def test_settings_are_the_same_in_the_whole_world(
    kind: str, topology: Topology, named: str
) -> None:
    """Not only where ranks exchange: instances would part, stages would train
    differently.
    """
    for text in run(_disagree, topology.world_size, topology, kind, timeout=60.0):
        said = f"PlanMismatchError: ranks disagree, first at {named}"
        assert text.startswith(said), text


def _error_without_an_attribute() -> str:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    made = DistributedOptimizer.__init__

    def made_by_a_fork(dist_opt: Any, *args: Any, **kwargs: Any) -> None:
        made(dist_opt, *args, **kwargs)
        if dist.get_rank() == 1:
            del dist_opt.shard_fp32_groups

    with mock.patch.object(DistributedOptimizer, "__init__", made_by_a_fork):
        return error_of(lambda: start(CASE, DP2))


def test_a_missing_attribute_is_an_error_that_names_it_and_ends_all_ranks() -> None:
    other, own = run(_error_without_an_attribute, 2, timeout=60.0)
    assert own.startswith("AttributeError: ") and "shard_fp32_groups" in own
    assert other.startswith("RuntimeError: ") and "rank 1" in other


def _error_without_a_group(moe: bool, missing: str) -> str:
    from types import SimpleNamespace

    from megatron_muon.mcore.wiring.build import make_muons
    from megatron_muon.settings.config import MuonConfig

    case = replace(CASE, optimizer="adam", moe=moe)
    built = start(case, ONE)
    groups = ("tp", "tp_dp_cp", "expt_tp", "ep")
    known = SimpleNamespace(**{name: object() for name in groups if name != missing})
    with pytest.raises(ValueError) as caught:
        make_muons(built.optimizer, built.chunks, MuonConfig(), pg_collection=known)
    return str(caught.value)


@pytest.mark.parametrize(
    "moe, group",
    [(False, "tp_dp_cp"), (False, "tp"), (True, "expt_tp"), (True, "ep")],
)
def test_process_groups_without_one_that_is_needed_are_refused(
    moe: bool, group: str
) -> None:
    (text,) = run(_error_without_a_group, 1, moe, group)
    assert f"give the pg_collection its {group} group" in text
