"""Adam with the interface and state layout of Transformer Engine's FusedAdam, in plain
torch.

Source of the interface and formulas: NVIDIA TransformerEngine,
``transformer_engine/pytorch/optimizers/fused_adam.py`` and
``common/multi_tensor/adam.cu``.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_STATES = ("exp_avg", "exp_avg_sq")
# elements worked on at a time: bounds the temporaries to three times 4 MiB
_CHUNK = 1 << 20
# torch's warning where step() reads the gradient of a shard that has none
warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", module=__name__)


class FusedAdam(torch.optim.Optimizer):
    """AdamW (or Adam with L2 decay) in fp32, stepping as Transformer Engine's kernel
    does.

    ``step`` is an int in each parameter group, 1 after the first step, also in a group
    that has no parameters here: up to Transformer Engine 2.18 the step of such a group
    stays behind. States are fp32 tensors shaped like the parameter.

    Every operation rounds once and works element by element. So the result for an
    element does not depend on how a parameter is cut into shards. (addcmul, addcdiv and
    lerp may fuse the multiply and the add in the vector loop and not in its tail.)

    ``adam_w_mode`` decouples weight decay; False adds ``weight_decay * p`` to the
    gradient.

    Raises:
        NotImplementedError: another option of Transformer Engine's, not at its default.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        **unsupported: Any,
    ) -> None:
        for name, value in unsupported.items():
            if value not in (False, torch.float32):
                raise NotImplementedError(
                    f"{name}={value}: the CPU's FusedAdam lacks it; run on a GPU with "
                    "Transformer Engine"
                )
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"bias_correction": bias_correction, **numbers})
        self.adam_w_mode = 1 if adam_w_mode else 0

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        """Give ``param`` zero fp32 moments; the second argument, False here, has no
        default.
        """
        for name in _STATES:
            self.state[param][name] = torch.zeros_like(param, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step over all groups; parameters without gradient get state but do not
        move.
        """
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if len(self.state[param]) == 0:
                    self.initialize_state(param, False)
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        assert param.grad is not None
        moments = [self.state[param][name] for name in _STATES]
        tensors = [param.detach(), param.grad.detach(), *moments]
        for p, g, m, v in _chunks(tensors):
            wide = p if p.dtype == torch.float32 else p.float()
            _adam(wide, g.float(), m, v, group, bool(self.adam_w_mode))
            if wide is not p:
                p.copy_(wide)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, keeping the moments in fp32 and in memory of this optimizer's own."""
        super().load_state_dict(state_dict)
        for ours, saved in zip(
            self.param_groups, state_dict["param_groups"], strict=True
        ):
            for param, index in zip(ours["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(index, {}).items():
                    # torch's loader casts to the parameter's dtype and aliases
                    wide = value.detach().to(param.device, torch.float32)
                    self.state[param][name] = wide.clone()


def _chunks(tensors: list[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """All tensors cut at the same places, every ``_CHUNK`` elements; whole if
    strided.
    """
    if tensors[0].numel() <= _CHUNK or not all(t.is_contiguous() for t in tensors):
        return [tuple(tensors)]
    return zip(*(torch.split(t.view(-1), _CHUNK) for t in tensors), strict=True)


def _adam(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    group: dict[str, Any],
    decoupled: bool,
) -> None:
    """Update p, m, v (fp32, same shape) in place, in single-rounding element-wise
    operations.

    m = b1 m + (1-b1) g; v = b2 v + (1-b2) g g; p -= lr (mhat / (sqrt(vhat) + eps) + wd
    p)
    """
    beta1, beta2 = group["betas"]
    decay = group["weight_decay"]
    correct = group["bias_correction"]
    if not decoupled and decay != 0:
        g = g + p * decay
    m.mul_(beta1).add_(g * (1 - beta1))
    v.mul_(beta2).add_((g * (1 - beta2)).mul_(g))
    denominator = v / (1 - beta2 ** group["step"]) if correct else v.clone()
    denominator.sqrt_().add_(group["eps"])
    update = m / (1 - beta1 ** group["step"]) if correct else m.clone()
    update.div_(denominator)
    if decoupled and decay != 0:
        update.add_(p * decay)
    p.sub_(update.mul_(group["lr"]))
