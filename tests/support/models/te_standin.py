"""Stand-ins for Transformer Engine's linears as megatron-core 0.16.1 wraps them, without a GPU.

For tests where its Python is not at hand. They are as Transformer Engine up to 2.12 with cores 0.13
to 0.18, which ``test_te_marks`` holds them to: later ones mark grouped weights otherwise. Not here:
fused norms, sequential experts, and MLA of core 0.12, whose down projections are cut.

They have the class names, parameter names, shapes, attributes and marks of the originals
(megatron/core/extensions/transformer_engine.py and Transformer Engine's ``Linear`` and
``GroupedLinear``), and no forward. The marks are the point: Transformer Engine stamps
``tensor_model_parallel=True`` on every weight, with ``partition_dim`` 1 if it was told that the
weight is row-parallel and 0 otherwise; and Megatron tells it nothing about weights that are
duplicated over TP, and nothing about experts under expert or expert-tensor parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes


class _Linear(torch.nn.Module):
    """What Transformer Engine's linears have in common: marked weights."""

    parallel_mode: str | None

    def _add_weight(self, name: str, shape: tuple[int, int], config: Any) -> None:
        weight = torch.nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
        self.register_parameter(name, weight)
        dim = 1 if self.parallel_mode == "row" else 0
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)

    def forward(self, *args: object) -> None:
        raise NotImplementedError("a stand-in has no forward")


class TELinear(_Linear):
    """Megatron's TELinear with ``parallel_mode='duplicated'``: each TP rank has all of the weight,
    and Transformer Engine, which is told ``parallel_mode=None``, marks it as cut along dim 0."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: Any,
        bias: bool,
        is_expert: bool = False,
        tp_group: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        assert parallel_mode == "duplicated" and tp_group is None and not (bias or is_expert)
        self.config = config
        self.parallel_mode = None
        self.tp_size = 1
        self.in_features, self.out_features = input_size, output_size
        self._add_weight("weight", (output_size, input_size), config)
        self.weight.allreduce = True
        self.weight.sequence_parallel = config.sequence_parallel


class TEGroupedLinear(_Linear):
    """Megatron's TEGroupedLinear: a weight per local expert, cut over expert TP by Megatron."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: Any,
        bias: bool,
        is_expert: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        assert is_expert and not bias
        # later versions hand on a collection, of Megatron's global groups in the tests
        tp_size = parallel_state.get_expert_tensor_parallel_group().size()
        self.config, self.num_gemms = config, num_gemms
        self.expert_parallel = config.expert_model_parallel_size > 1
        self.explicit_expert_comm = tp_size > 1 or self.expert_parallel
        self.parallel_mode: str | None = parallel_mode
        self.tp_size = tp_size
        if self.explicit_expert_comm:
            if parallel_mode == "column":
                output_size //= tp_size
            else:
                input_size //= tp_size
            self.parallel_mode, self.tp_size = None, 1
        self.in_features, self.out_features = input_size, output_size
        for gemm in range(num_gemms):
            self._add_weight(f"weight{gemm}", (output_size, input_size), config)
        for weight in self.parameters():
            weight.allreduce = not self.expert_parallel


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    """fc1 of Megatron's TEGroupedMLP."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, parallel_mode="column", **kwargs)


class TERowParallelGroupedLinear(TEGroupedLinear):
    """fc2 of Megatron's TEGroupedMLP."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, parallel_mode="row", **kwargs)
