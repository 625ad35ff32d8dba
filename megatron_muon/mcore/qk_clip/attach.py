"""Watching and clipping a run: checks before its optimizer is built, and the clip after
a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_muon.mcore.host.process_groups import Chunks, group_of
from megatron_muon.mcore.host.shards import device_of
from megatron_muon.mcore.host.states import adam_holds_main
from megatron_muon.mcore.qk_clip import is_asked, uses_fsdp
from megatron_muon.mcore.qk_clip.attentions import WatchedAttention, watched_attentions
from megatron_muon.mcore.qk_clip.clip import QkClip, shards_of
from megatron_muon.mcore.qk_clip.local import collect_maxima
from megatron_muon.runtime.patches import turn_into
from megatron_muon.settings.config import MuonConfig, named

_CLIP = "_muon_clip"  # an attribute of a rank's first model chunk


def prepare(
    optimizer_config: Any,
    model_chunks: Chunks,
    config: MuonConfig,
    pg_collection: Any,
) -> list[WatchedAttention]:
    """Check a run that watches or clips logits; returns its
    ``watched_attentions``.
    """
    if is_asked(model_chunks, config):
        _refuse_modes(optimizer_config, model_chunks)
    group_of("tp_dp_cp", pg_collection)
    tp_size = group_of("tp", pg_collection).size()
    return list(watched_attentions(model_chunks, config, tp_size))


def attach(
    attentions: Sequence[WatchedAttention],
    optimizer: Any,
    model_chunks: Chunks,
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
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    clip = QkClip(
        attentions=tuple(attentions),
        shards=shards_of(parts, attentions),
        group=group_of("tp_dp_cp", pg_collection),
        tp=group_of("tp", pg_collection),
        device=device_of(model_chunks),
        following=tuple(_following(parts, model_chunks)),
        clips_in_step=config.qk_clip is not None,
    )
    setattr(model_chunks[0], _CLIP, clip)
    if clip.clips_in_step:
        optimizer.qk_clip = clip
        turn_into(optimizer, _clipping(type(optimizer)))


def _following(
    parts: Sequence[Any], model_chunks: Chunks
) -> Iterator[Callable[[], None]]:
    ddp_config = model_chunks[0].ddp_config
    in_fp8 = getattr(ddp_config, "fp8_param_gather", False)
    if in_fp8:
        yield from (part._copy_main_params_to_model_params for part in parts)
    if ddp_config.overlap_param_gather:
        return  # the next forward pass gathers
    if in_fp8 or adam_holds_main(parts[0].config):
        yield from (chunk.start_param_sync for chunk in model_chunks)


def clip_qk(
    original: Callable[..., float], model: Sequence[Any], log_max_only: bool = False
) -> float:
    """Wraps Megatron's, which takes a shard of a main parameter for the whole matrix;
    returns the largest logit.
    """
    clip: QkClip | None = getattr(model[0], _CLIP, None)
    if clip is None:
        return original(model, log_max_only=log_max_only)
    if not clip.clips_in_step:
        clip.apply(only_watch=log_max_only)
    return clip.largest


def _clipping(optimizer: type) -> type:
    """A subclass of a chain of optimizers that clips at the end of its step.

    A chain with Muon changes its class a second time here: AdamW's are clipped, too,
    and neither class needs to know of the other.
    """

    class Clipping(optimizer):  # type: ignore[misc]
        qk_clip: QkClip

        def step(self) -> Any:
            result = super().step()
            self.qk_clip.apply()
            return result

    Clipping.__name__ = f"Clipping{optimizer.__name__}"
    return Clipping


def _refuse_modes(optimizer_config: Any, model_chunks: Chunks) -> None:
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
        "use_megatron_fsdp": "a rank has parts of the weights themselves",
    }
    on = {"use_megatron_fsdp"} if uses_fsdp(model_chunks) else set()
    for name, reason in modes.items():
        if name in on or getattr(optimizer_config, name, False):
            raise NotImplementedError(
                f"clipped attention logits (--qk-clip, --muon-qk-clip) with {name} "
                f"(--{name.replace('_', '-')}): {reason}. Use only one of the two"
            )
