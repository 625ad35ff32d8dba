"""Stand-ins for Transformer Engine's linears as megatron-core 0.16.1 wraps them,
without a GPU.

For tests where its Python is not at hand. They are as Transformer Engine up to 2.12
with cores 0.13 to 0.18, which ``test_te_modules`` holds them to: later ones mark
grouped weights otherwise. Not here: fused norms, sequential experts, and MLA of core
0.12, whose down projections are cut.

The linears are the dry run's. The marks are the point: Transformer Engine marks every
weight as cut, along dim 1 if it was told that the weight is row-parallel and 0
otherwise; and Megatron tells it nothing about weights that are duplicated over TP, and
nothing about experts under expert or expert-tensor parallelism.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state

from megatron_muon.lab.dry_run.stand_ins import _GroupedLinear, _Linear


class TELinear(_Linear):
    """Megatron's TELinear with ``parallel_mode='duplicated'``: each TP rank has all of
    the weight, and Transformer Engine, which is told ``parallel_mode=None``, marks it
    as cut along dim 0.
    """

    def __init__(
        self, *sizes: int, parallel_mode: str, config: Any, **options: Any
    ) -> None:
        assert parallel_mode == "duplicated" and not options["bias"]
        super().__init__(*sizes, bias=False, params_dtype=config.params_dtype)
        self.config = config
        self.weight.allreduce = True
        self.weight.sequence_parallel = config.sequence_parallel


class TEGroupedLinear(_GroupedLinear):
    """Megatron's TEGroupedLinear: a weight per local expert, cut over expert TP by
    Megatron.
    """

    def __init__(
        self,
        num_gemms: int,
        *sizes: int,
        parallel_mode: str,
        config: Any,
        **options: Any,
    ) -> None:
        assert options["is_expert"] and not options["bias"]
        # later versions hand on a collection, of Megatron's global groups in the tests
        tp_size = parallel_state.get_expert_tensor_parallel_group().size()
        expert_parallel = config.expert_model_parallel_size > 1
        explicit = tp_size > 1 or expert_parallel
        if explicit and parallel_mode == "column":
            sizes = (sizes[0], sizes[1] // tp_size)
        elif explicit:
            sizes = (sizes[0] // tp_size, sizes[1])
        of_te, dtype = None if explicit else parallel_mode, config.params_dtype
        super().__init__(
            num_gemms, *sizes, parallel_mode=of_te, bias=False, params_dtype=dtype
        )
        self.config = config
        self.expert_parallel, self.explicit_expert_comm = expert_parallel, explicit
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
