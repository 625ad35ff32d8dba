"""The functions of ``torch.distributed`` over a virtual GPU: nothing arrives, all is
recorded.

The host waits in ``barrier`` and ``all_gather_object`` only. Groups come from torch's
"fake" backend. A function of torch.distributed that is not here raises. Source:
``distributed_c10d.py`` of torch 2.4 to 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from support.virtual_gpu.device.nccl import Handle, Launcher, Operation
from support.virtual_gpu.trace import RecordedMessage

_REFUSED = """
    all_to_all all_to_all_single broadcast gather scatter reduce reduce_scatter
    gather_object broadcast_object_list scatter_object_list all_gather_coalesced
    monitored_barrier all_reduce_coalesced send_object_list recv_object_list
    batch_send_recv send recv
""".split()


class VirtualNccl(Launcher):
    """The functions of torch.distributed, over one GPU."""

    # --- collectives -----------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Handle | None:
        agreed = ("all_reduce", tensor.dtype, tensor.numel(), str(op))
        return self.run(_part(agreed, [tensor], [tensor]), group, async_op)

    def all_gather_into_tensor(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Handle | None:
        _check_sizes(output_tensor, input_tensor, group)
        agreed = ("all_gather", input_tensor.dtype, input_tensor.numel())
        return self.run(_part(agreed, [input_tensor], [output_tensor]), group, async_op)

    def all_gather(
        self,
        tensor_list: list[Tensor],
        tensor: Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Handle | None:
        agreed = ("all_gather", tensor.dtype, tensor.numel())
        return self.run(_part(agreed, [tensor], tensor_list), group, async_op)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Handle | None:
        _check_sizes(input, output, group)
        agreed = ("reduce_scatter", input.dtype, input.numel(), str(op))
        return self.run(_part(agreed, [input], [output]), group, async_op)

    def barrier(
        self, group: Any = None, async_op: bool = False, device_ids: Any = None
    ) -> None:
        """An all-reduce that the host waits for."""
        if async_op:
            raise NotImplementedError("a barrier that nobody waits for")
        self.run(_part(("barrier",), [], []), group, False)
        self.gpu.synchronize("barrier", self.gpu.stream)

    def all_gather_object(
        self, object_list: list[Any], obj: Any, group: Any = None
    ) -> None:
        """Every rank says what this one says; the host reads the sizes and the
        bytes.
        """
        object_list[:] = [obj] * len(object_list)
        for what in ("sizes", "bytes"):
            self.run(_part(("all_gather", "object", what), [], []), group, False)
            self.gpu.synchronize("all_gather_object", self.gpu.stream)

    # --- point to point --------------------------------------------------------------------------

    def isend(
        self,
        tensor: Tensor,
        dst: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Handle | None:
        message = _message(_in_group(group, dst, group_dst), tensor)
        part = Operation("send", [tensor], [], (), sends=(message,))
        return self.run(part, group, True, message.peer)

    def irecv(
        self,
        tensor: Tensor,
        src: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Handle | None:
        message = _message(_in_group(group, src, group_src), tensor)
        part = Operation("recv", [], [tensor], (), receives=(message,))
        return self.run(part, group, True, message.peer)

    def batch_isend_irecv(self, p2p_op_list: Sequence[dist.P2POp]) -> list[Handle]:
        """One launch on the group's stream."""
        groups = {self.group(op.group).name for op in p2p_op_list}
        if len(groups) != 1:
            raise ValueError(
                f"a batch of operations is over one group, got {sorted(groups)}"
            )
        with self.coalescing(p2p_op_list[0].group, async_ops=True) as manager:
            for op in p2p_op_list:
                op.op(op.tensor, op.peer, op.group, op.tag)
        return manager.works

    # --- in place --------------------------------------------------------------------------------

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace torch.distributed's functions by these, also where a module imported
        one.
        """
        functions = {name: getattr(self, name) for name in _FUNCTIONS}
        functions |= {name: _refusing(name) for name in _REFUSED}
        changes = {
            id(getattr(distributed_c10d, name)): function
            for name, function in functions.items()
            if hasattr(distributed_c10d, name)  # releases lack some
        }
        kept = list(_rebind(changes))
        try:
            yield
        finally:
            for module, name, original in kept:
                setattr(module, name, original)


_FUNCTIONS = """
    _coalescing_manager all_reduce all_gather_into_tensor _all_gather_base
    _reduce_scatter_base all_gather reduce_scatter_tensor barrier all_gather_object
    isend irecv batch_isend_irecv all_gather_single reduce_scatter_single
""".split()
# older and newer names of the same
for _name in ("_all_gather_base", "all_gather_single"):
    setattr(VirtualNccl, _name, VirtualNccl.all_gather_into_tensor)
for _name in ("_reduce_scatter_base", "reduce_scatter_single"):
    setattr(VirtualNccl, _name, VirtualNccl.reduce_scatter_tensor)
VirtualNccl._coalescing_manager = VirtualNccl.coalescing


def _rebind(changes: dict[int, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Put the new functions wherever a loaded module of torch or Megatron has an old
    one.
    """
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(("torch.distributed", "megatron")):
            continue
        if changes.keys().isdisjoint(map(id, vars(module).values())):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in changes and callable(value):
                setattr(module, name, changes[id(value)])
                yield module, name, value


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"the virtual GPU has no torch.distributed.{name}")

    return refused


def _part(
    agreed: tuple[object, ...], reads: Sequence[Any], writes: Sequence[Any]
) -> Operation:
    return Operation(str(agreed[0]), list(reads), list(writes), agreed)


def _check_sizes(large: Tensor, small: Tensor, group: Any) -> None:
    size = dist.get_world_size(group)
    if large.numel() != size * small.numel():
        raise ValueError(f"{large.numel()} is not {size} x {small.numel()}")


def _message(peer: int, tensor: Any) -> RecordedMessage:
    start = tensor.inner.storage_offset() * tensor.inner.element_size()
    return RecordedMessage(peer, tensor.dtype, tensor.nbytes, start)


def _in_group(group: Any, rank: int | None, group_rank: int | None) -> int:
    if group_rank is not None:
        return group_rank
    if rank is None:
        raise ValueError("no peer is named")
    return rank if group is None else dist.get_group_rank(group, rank)
