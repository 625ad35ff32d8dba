"""Bad input: one clear error each, on every rank, before anything is trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpt import (
    Case,
    Topology,
    build,
    distributed_optimizers,
    held,
    make_optimizer,
    set_schedule,
    start,
    take_step,
    write_grads,
)
from ranks import run

CASE = Case(layers=2, steps=1)


def _error_of_building(case: Case, topology: Topology, changes: dict[str, Any]) -> str:
    """Change attributes of the configs, then ask for the optimizer; the error as text."""
    import torch.distributed as dist
    from megatron.core import parallel_state as ps
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import megatron_muon

    built = build(case, topology)
    if "groups" in changes:
        ps.destroy_model_parallel()
        ps.initialize_model_parallel(1, 1, **changes["groups"])
    options: dict[str, Any] = {
        "optimizer": "muon",
        "lr": 0.01,
        "bf16": case.bf16,
        "params_dtype": case.dtype,
        "use_distributed_optimizer": True,
        **changes.get("optimizer", {}),
    }
    config = OptimizerConfig(**options)
    for name, value in changes.get("late", {}).items():
        setattr(config, name, value)
    for name, value in changes.get("ddp", {}).items():
        setattr(built.ddp.ddp_config, name, value)
    for name, value in changes.get("model", {}).items():
        setattr(built.ddp.module.config, name, value)
    collectives: list[str] = []

    def forbidden(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            collectives.append(name)
            raise AssertionError(f"{name} called before the error")

        return call

    names = [name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast"))]
    originals = {name: getattr(dist, name) for name in names}
    megatron_muon.install()
    try:
        for name in names:
            setattr(dist, name, forbidden(name))
        get_megatron_optimizer(config, [built.ddp] * changes.get("chunks", 1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
        megatron_muon.uninstall()
    return "no error"


UNSUPPORTED = {
    "no distributed optimizer": (
        {"optimizer": {"use_distributed_optimizer": False}},
        "ValueError: optimizer='muon' shards over Megatron's distributed optimizer, but "
        "OptimizerConfig.use_distributed_optimizer is False: set it",
    ),
    "ddp without distributed optimizer": (
        {"ddp": {"use_distributed_optimizer": False}},
        "DistributedDataParallelConfig.use_distributed_optimizer is False: set it in",
    ),
    "l2 regularization": (
        {"optimizer": {"decoupled_weight_decay": False}},
        "ValueError: optimizer='muon' decays weights as AdamW does: set decoupled_weight_decay",
    ),
    "spelling": ({"late": {"optimizer": "Muon"}}, "ValueError: write optimizer='muon', got 'Muon'"),
    "fp16": ({"optimizer": {"fp16": True, "bf16": False}}, "does not support fp16 yet"),
    "precision-aware": (
        {"late": {"use_precision_aware_optimizer": True}},  # its __post_init__ wants adam
        "does not support use_precision_aware_optimizer yet (got True)",
    ),
    "offload": (
        {"optimizer": {"optimizer_cpu_offload": True}},
        "does not support optimizer_cpu_offload yet",
    ),
    "early gather": (
        {"optimizer": {"overlap_param_gather_with_optimizer_step": True}},
        "overlap_param_gather_with_optimizer_step yet (got True): use overlap_param_gather",
    ),
    "megatron fsdp": ({"ddp": {"use_megatron_fsdp": True}}, "support use_megatron_fsdp yet"),
    "instances": (
        {
            "ddp": {"num_distributed_optimizer_instances": 2},
            "groups": {"num_distributed_optimizer_instances": 2},
        },
        "does not support num_distributed_optimizer_instances yet (got 2): use one instance",
    ),
    "fp8": ({"model": {"fp8": "e4m3"}}, "does not support fp8 yet (got 'e4m3')"),
    "cp": ({"model": {"context_parallel_size": 2}}, "does not support context_parallel_size yet"),
    "moe": ({"model": {"num_moe_experts": 4}}, "does not support num_moe_experts yet (got 4)"),
    "mla": ({"model": {"multi_latent_attention": True}}, "support multi_latent_attention yet"),
    "mtp": ({"model": {"mtp_num_layers": 1}}, "does not support mtp_num_layers yet (got 1)"),
    "chunks": ({"chunks": 2}, "virtual_pipeline_model_parallel_size yet (got 2): use one"),
    "ignored setting": (
        {"optimizer": {"muon_momentum": 0.5}},
        "ValueError: OptimizerConfig.muon_momentum=0.5 configures Megatron's own Muon",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_mode_is_refused_before_any_collective(name: str) -> None:
    changes, message = UNSUPPORTED[name]
    for text in run(_error_of_building, 2, CASE, Topology(dp=2), changes):
        assert message in text, text


class _Fsdp2(torch.nn.Module):
    """What get_megatron_optimizer needs of a chunk, as torch FSDP2's wrapper has it."""

    def __init__(self, ddp: Any) -> None:
        super().__init__()
        self.ddp_config, self.config, self.module = ddp.ddp_config, ddp.config, ddp.module


def _error_with_another_wrapper() -> str:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import megatron_muon

    chunk = _Fsdp2(build(CASE, Topology()).ddp)
    config = OptimizerConfig(optimizer="muon", lr=0.1, use_distributed_optimizer=True)
    megatron_muon.install()
    try:
        with pytest.raises(NotImplementedError) as caught:
            get_megatron_optimizer(config, [chunk])
    finally:
        megatron_muon.uninstall()
    return str(caught.value)


def test_a_chunk_without_megatrons_ddp_is_refused() -> None:
    (text,) = run(_error_with_another_wrapper, 1)
    assert "does not support _Fsdp2 yet: wrap model chunks in Megatron's" in text


def _disagree(topology: Topology, kind: str) -> str:
    """The last rank differs; every rank must get an error."""
    import torch.distributed as dist

    import megatron_muon

    built = build(CASE, topology)
    odd = dist.get_rank() == dist.get_world_size() - 1
    settings: dict[str, Any] = {}
    if odd and kind == "settings":
        settings = {"momentum": 0.9}
    if odd and kind == "routing":  # as if a checkout of another version marked it
        name = next(n for n in built.params if n.endswith("linear_fc2.weight"))
        built.params[name].is_embedding_or_output_parameter = True
    if odd and kind == "shape":
        built.ddp.module.module.config.num_query_groups = 4
    megatron_muon.install(megatron_muon.MuonConfig(**settings))
    try:
        make_optimizer(built)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        megatron_muon.uninstall()
    return "no error"


@pytest.mark.parametrize(
    ("kind", "named"),
    [("settings", "settings"), ("routing", "linear_fc2.weight"), ("shape", "decoder.layers")],
)
@pytest.mark.parametrize("topology", [Topology(dp=3), Topology(tp=2, pp=2, dp=2)], ids=str)
def test_ranks_that_disagree_all_get_an_error_that_names_the_difference(
    topology: Topology, kind: str, named: str
) -> None:
    texts = run(_disagree, topology.world_size, topology, kind, timeout=60.0)
    last_stage = texts[-(len(texts) // topology.pp) :]
    for text in texts:
        assert text != "no error"
        assert "disagree about the exchange plan" in text or "cannot split it" in text, text
    for text in last_stage[:-1]:
        assert text.startswith("PlanMismatchError"), text
        assert named in text.split("first at ")[1].split("\n")[0]
        assert kind != "shape" or "cannot split it, set split_qkv=False" in text


def _bad_gradient(topology: Topology, bad: float, where: str, clip: float) -> dict[str, Any]:
    """One bad element on one rank; the error as text, and whether anything changed."""
    built = start(replace(CASE, clip=clip), topology)
    take_step(built, 0)
    before = held(built)["shards"]
    set_schedule(built, 1)
    write_grads(built, 1)
    (megatron,) = distributed_optimizers(built.optimizer)
    owned = where in held(built)["shards"] and built.tp_rank == 0
    if owned:
        start_of_piece, _, _ = held(built)["shards"][where]
        built.params[where].main_grad.view(-1)[start_of_piece] = bad
    try:
        built.optimizer.step()
        text = "no error"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    after = held(built)["shards"]
    same = all(
        (before[name][2][kind] == after[name][2][kind]).all()
        for name in before
        for kind in before[name][2]
    )
    return {"text": text, "same": same, "owned": owned, "muon": megatron.muon is not None}


@pytest.mark.parametrize("clip", [0.0, 1.0], ids=["", "clip"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize(
    "where", ["decoder.layers.0.mlp.linear_fc1.weight", "embedding.word_embeddings.weight"]
)
def test_a_bad_gradient_is_an_error_everywhere_and_changes_nothing(
    where: str, bad: float, clip: float
) -> None:
    topology = Topology(tp=2, pp=2, dp=1)
    results = run(_bad_gradient, topology.world_size, topology, bad, where, clip)
    assert sum(result["owned"] for result in results) == 1
    for result in results:
        assert result["same"]
        wanted = "FloatingPointError: " if result["owned"] else "RuntimeError: rank "
        assert result["text"].startswith(wanted), result["text"]
        short = where.removeprefix("decoder.layers.0.")
        assert "NaN or Inf" in result["text"] and short in result["text"]


def _nan_with_megatrons_check(topology: Topology) -> str:
    """Megatron's own check looks at the buffer when the gradients are reduced."""
    built = start(CASE, topology)
    for group in built.ddp.bucket_groups:
        group.ddp_config = replace(group.ddp_config, check_for_nan_in_grad=True)
    write_grads(built, 0)
    next(iter(built.params.values())).main_grad.view(-1)[0] = float("nan")
    try:
        built.ddp.finish_grad_sync()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_with_megatrons_nan_check_on_it_raises() -> None:
    for text in run(_nan_with_megatrons_check, 2, Topology(dp=2)):
        assert "found NaN" in text, text


def _checkpoint_errors() -> list[str]:
    built = start(CASE, Topology())
    take_step(built, 0)
    (megatron,) = distributed_optimizers(built.optimizer)
    texts = []
    for call in (
        built.optimizer.state_dict,
        lambda: built.optimizer.load_state_dict({}),
        lambda: megatron.sharded_state_dict({}),
        lambda: megatron.save_parameter_state("state.pt"),
        lambda: megatron.load_parameter_state("state.pt"),
    ):
        with pytest.raises(NotImplementedError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_saving_and_loading_are_refused_not_wrong() -> None:
    (texts,) = run(_checkpoint_errors, 1)
    assert all("--no-save-optim" in text for text in texts)


def _hook_errors() -> list[str]:
    import megatron.core
    from megatron.core import optimizer as mcore_optimizer

    import megatron_muon
    from megatron_muon.mcore.hooks import SeamError

    texts = []
    original = mcore_optimizer._get_param_groups
    version = megatron.core.__version__
    try:
        mcore_optimizer._get_param_groups = lambda model_chunks, config: []
        with pytest.raises(SeamError) as caught:
            megatron_muon.install()
        texts.append(str(caught.value))
        del mcore_optimizer._get_param_groups
        with pytest.raises(SeamError) as caught:
            megatron_muon.install()
        texts.append(str(caught.value))
        mcore_optimizer._get_param_groups = original
        megatron.core.__version__ = "0.99.0"
        with pytest.raises(SeamError) as caught:
            megatron_muon.install()
        texts.append(str(caught.value))
    finally:
        mcore_optimizer._get_param_groups = original
        megatron.core.__version__ = version
    with pytest.raises(TypeError) as wrong:
        megatron_muon.install({"momentum": 0.9})  # type: ignore[arg-type]
    return [*texts, str(wrong.value)]


def _error_without_an_attribute() -> str:
    from megatron_muon.mcore.hooks import SeamError, check_built

    megatron = start(replace(CASE, optimizer="adam"), Topology()).optimizer.chained_optimizers[0]
    check_built(megatron)
    del megatron.shard_fp32_groups
    with pytest.raises(SeamError) as caught:
        check_built(megatron)
    return str(caught.value)


def test_a_missing_attribute_is_an_error_that_names_it() -> None:
    (text,) = run(_error_without_an_attribute, 1)
    assert "DistributedOptimizer of megatron-core 0.16.1 has no shard_fp32_groups" in text


def _error_without_the_stage_group() -> str:
    from megatron_muon.config import MuonConfig
    from megatron_muon.mcore.build import make_muons

    megatron = start(replace(CASE, optimizer="adam"), Topology()).optimizer.chained_optimizers[0]
    with pytest.raises(ValueError) as caught:
        make_muons(megatron, MuonConfig(), pg_collection=object())
    return str(caught.value)


def test_process_groups_without_the_stages_are_refused() -> None:
    (text,) = run(_error_without_the_stage_group, 1)
    assert "give the pg_collection its tp_dp_cp group" in text


def test_a_changed_megatron_is_an_error_that_names_the_symbol() -> None:
    (texts,) = run(_hook_errors, 1)
    changed, gone, version, wrong = texts
    symbol = "megatron.core.optimizer._get_param_groups"
    assert f"{symbol} of megatron-core 0.16.1 has no parameter config_overrides" in changed
    assert f"megatron-core 0.16.1 has no {symbol}" in gone
    assert "megatron-core 0.99.0 is installed; this megatron_muon was tested with 0.16.1" in version
    assert "install takes a MuonConfig, got {'momentum': 0.9}" in wrong
