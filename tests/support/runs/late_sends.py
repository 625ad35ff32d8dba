"""Point-to-point sends that read their tensor late: when it is waited for, or after a
while.

Memory that the tensor has given back by then is NaN first, as it may hold anything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_muon.runtime.patches import replaced

_SECONDS = 0.1  # until a send reads that nobody waits for
_lock = threading.Lock()
_unread: list[_Send] = []


@dataclass
class _Send:
    begin: Any
    tensor: Tensor
    memory: Tensor  # what the tensor was when the send was asked for
    work: Any = None

    def read(self) -> None:
        """Start this send, and before it those asked for earlier: the peer knows their
        order.
        """
        with _lock:
            while self.work is None:
                first = _unread.pop(0)
                if first.tensor.data_ptr() != first.memory.data_ptr():
                    first.memory.fill_(torch.nan)
                first.work = first.begin([first.memory])

    def wait(self) -> Any:
        self.read()
        return self.work.wait()


@contextmanager
def late_sends() -> Iterator[None]:
    """Within it all groups send so."""
    begin = dist.ProcessGroup.send

    def send(group: dist.ProcessGroup, tensors: list[Tensor], *where: int) -> Any:
        (tensor,) = tensors
        late = _Send(lambda read: begin(group, read, *where), tensor, tensor.detach())
        with _lock:
            _unread.append(late)
        threading.Timer(_SECONDS, late.read).start()
        return late

    with replaced(dist.ProcessGroup, send=send):
        yield
