"""Watching and clipping a run: checks before its optimizer is built, and the clip after
a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_muon.mcore.host.process_groups import group_of
from megatron_muon.mcore.host.shards import device_of
from megatron_muon.mcore.host.states import adam_holds_main
from megatron_muon.mcore.qk_clip import is_asked, uses_fsdp
from megatron_muon.mcore.qk_clip.attentions import WatchedAttention, watched_attentions
from megatron_muon.mcore.qk_clip.clip import QkClip, shards_of
from megatron_muon.mcore.qk_clip.local import collect_maxima
from megatron_muon.runtime.patches import turn_into
from megatron_muon.settings.config import MuonConfig, named

_CLIP = "_muon_clip"  # an attribute of a rank's first model chunk


@dataclass(slots=True)
class RunClip:
    """The clip of a run, and what its steps have found."""

    clip: QkClip
    clips_in_step: (
        bool  # the optimizer's step clips; else Megatron's training loop asks for it
    )
    largest: float = 0.0  # the largest logit of the last step that clipped

    def after_step(self) -> None:
        self.largest = self.clip.apply()


def prepare(
    optimizer_config: Any,
    model_chunks: Sequence[Any],
    config: MuonConfig,
    pg_collection: Any,
) -> list[WatchedAttention]:
    """Check a run whose logits are to be watched or clipped; as
    ``watched_attentions``.
    """
    if is_asked(model_chunks, config):
        _refuse_modes(optimizer_config, model_chunks)
    group_of("tp_dp_cp", pg_collection)
    return watched_attentions(
        model_chunks, config, group_of("tp", pg_collection).size()
    )


def attach(
    attentions: Sequence[WatchedAttention],
    optimizer: Any,
    model_chunks: Sequence[Any],
    config: MuonConfig,
    pg_collection: Any,
) -> None:
    """Collect logits from now on, and clip where Megatron's training loop or a step
    asks.

    Megatron's loop calls ``clip_qk`` after each step where its own flags ask. With the
    plugin's, the optimizer clips at the end of its step.
    """
    for attention in attentions:
        if isinstance(attention.core, DotProductAttention):
            collect_maxima(attention.core)
    tp = group_of("tp", pg_collection)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    clip = QkClip(
        attentions=tuple(attentions),
        shards=shards_of(parts, attentions),
        group=group_of("tp_dp_cp", pg_collection),
        tp_rank=tp.rank(),
        tp_size=tp.size(),
        device=device_of(model_chunks),
        following=tuple(_following(parts, model_chunks)),
    )
    run_clip = RunClip(clip, clips_in_step=config.qk_clip is not None)
    setattr(model_chunks[0], _CLIP, run_clip)
    if run_clip.clips_in_step:
        optimizer.logits = run_clip
        turn_into(optimizer, _clipping(type(optimizer)))


def _following(
    parts: Sequence[Any], model_chunks: Sequence[Any]
) -> Iterator[Callable[[], None]]:
    ddp_config = model_chunks[0].ddp_config
    in_fp8 = getattr(ddp_config, "fp8_param_gather", False)
    if in_fp8:
        yield from (part._copy_main_params_to_model_params for part in parts)
    if (
        in_fp8 or adam_holds_main(parts[0].config)
    ) and not ddp_config.overlap_param_gather:
        yield from (chunk.start_param_sync for chunk in model_chunks)


def clip_qk(
    original: Callable[..., float], model: Sequence[Any], log_max_only: bool = False
) -> float:
    """The largest logit. Megatron's own takes a shard of a main parameter for the whole
    matrix.
    """
    run_clip: RunClip | None = getattr(model[0], _CLIP, None)
    if run_clip is None:
        return original(model, log_max_only=log_max_only)
    if run_clip.clips_in_step:
        return run_clip.largest
    return run_clip.clip.apply(only_watch=log_max_only)


def _clipping(optimizer: type) -> type:
    """A subclass of a chain of optimizers that clips at the end of its step."""

    class Clipping(optimizer):  # type: ignore[misc]
        logits: RunClip

        def step(self) -> Any:
            result = super().step()
            self.logits.after_step()
            return result

    Clipping.__name__ = f"Clipping{optimizer.__name__}"
    return Clipping


def _refuse_modes(optimizer_config: Any, model_chunks: Sequence[Any]) -> None:
    """Refuse what keeps main parameters elsewhere, or gathers weights before the
    clip.
    """
    if not optimizer_config.use_distributed_optimizer:
        raise ValueError(
            f"{named('qk_clip')} clips shards of the distributed optimizer: set "
            "use_distributed_optimizer (--use-distributed-optimizer), or drop it"
        )
    modes = {
        "offload_optimizer_states": "the main parameters that it updates are elsewhere",
        "overlap_param_gather_with_optimizer_step": (
            "weights are gathered before they are clipped"
        ),
        "reuse_grad_buf_for_mxfp8_param_ag": (
            "they are gathered in the memory of gradients"
        ),
    }
    on = {
        name: why
        for name, why in modes.items()
        if getattr(optimizer_config, name, False)
    }
    if uses_fsdp(model_chunks):
        on["use_megatron_fsdp"] = "a rank has parts of the weights themselves"
    for name, why in on.items():
        raise NotImplementedError(
            f"clipped attention logits (--qk-clip, --muon-qk-clip) with {name} "
            f"(--{name.replace('_', '-')}): {why}: leave out one of both"
        )
