"""Reading checkpoints of AdamW, or of Megatron's own Muon, into Muon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from megatron_muon.mcore.checkpoint.interop import foreign
from megatron_muon.mcore.checkpoint.interop.saved import Saved
from megatron_muon.mcore.checkpoint.state import FromAdamW
from megatron_muon.mcore.host.shards import owned_shards, parts_of
from megatron_muon.runtime.consensus import together
from megatron_muon.runtime.patches import replaced
from megatron_muon.runtime.states import MAIN_KEY, write_halves


def reading_adamw(optimizer: Any, momentum: FromAdamW) -> AbstractContextManager[None]:
    """See ``megatron_muon.reading_adamw``.

    It takes over main parameters, steps, groups, and both moments of AdamW's remaining
    parameters. Muon's momentum is Σ μ^k g where Adam's first moment is (1-β1) Σ β1^k g.
    """
    return _converting(optimizer, "AdamW", from_adamw=momentum)


@contextmanager
def reading_megatron_muon(optimizer: Any, folder: str | Path) -> Iterator[None]:
    """See ``megatron_muon.reading_megatron_muon``.

    A momentum coefficient that differs is printed, as other settings are.
    """
    source = together(lambda: _source(Saved.of(folder), optimizer))
    with (
        replaced(optimizer, source=source),
        _converting(optimizer, "Megatron's own Muon", main_is_weight=source.is_fp32),
    ):
        yield


@contextmanager
def _converting(optimizer: Any, writer: str, **modes: Any) -> Iterator[None]:
    """A context in which the optimizers load in these modes. At its end their main
    parameters are checked.

    After an error the optimizer neither steps nor is saved if it has loaded anything.
    """
    parts = parts_of(optimizer)
    with ExitStack() as loading:
        loading.enter_context(replaced(optimizer, is_converting=True))
        for part in parts:
            loading.enter_context(replaced(part, **modes))
        yield
    together(lambda: _check_main_params(parts, writer))
    for part in parts:
        part.half_loaded = False


def _source(saved: Saved, optimizer: Any) -> foreign.Source:
    if not saved.is_megatrons:
        raise ValueError(
            f"{saved.folder} is no checkpoint of Megatron's own Muon in torch_dist"
        )
    saved.require_plain_groups()
    source = foreign.Source(saved.keys, saved.states)
    if source.is_fp32 and (optimizer.config.bf16 or optimizer.config.fp16):
        raise ValueError(
            f"{saved.folder} is of an fp32 model, whose weights are its main "
            "parameters; this run would read them rounded: load it in fp32 and save "
            "it, or load the model alone (--no-load-optim)"
        )
    return source


def _check_main_params(parts: Sequence[Any], writer: str) -> None:
    """Refuse main parameters that do not round to the model's weights; names one."""
    for part in parts:
        for param, shard in owned_shards(part):
            here = part._get_model_param_range_map(param)["param"]
            main = part.states.get(shard, MAIN_KEY).to(param.device)
            if _rounds_to(main, param.detach(), slice(here.start, here.end)):
                continue
            raise ValueError(
                f"the main parameter of {part._name_of[param]} that {writer}'s "
                "checkpoint has does not round to the model's weight: load the model's "
                "weights before the optimizer. (fully_reshardable of Megatron 0.15 to "
                "0.19 saves shifted optimizer state where there are several padded "
                "buckets; such a checkpoint has lost it: load the model alone, in "
                "Megatron-LM by --no-load-optim)"
            )


def _rounds_to(shard: Tensor, model: Tensor, here: slice) -> bool:
    """Whether an fp32 shard rounds to that part of the model's weight.

    A weight in fp8 was rounded by a scale that may have changed since. e4m3 has three
    bits after the leading one, and steps of 2^-9 at the lower end. Each of two
    roundings may be half a step off.
    """
    if not is_float8tensor(model):
        weight = model.view(-1)[here]
        rounds = shard.to(weight.dtype) == weight
        # FusedAdam with remainders rounds ties away from zero
        if weight.dtype == torch.bfloat16:
            away = torch.empty_like(weight)
            remainder = torch.empty_like(weight, dtype=torch.int16)
            write_halves(shard.clone(), away, remainder)
            rounds |= away == weight
        return bool(rounds.all())
    values = model.dequantize().float()
    weight = values.view(-1)[here]
    # blocks have scales that fit them, within 2 times
    scale = getattr(model, "_scale_inv", None)
    step = 2.0**-9 * (2 / 448 * values.abs().max() if scale is None else scale.max())
    return bool(((shard - weight).abs() <= 2.0**-3 * shard.abs() + step).all())
