"""A GPU that is not there: the real step of any rank, recorded op by op, without a GPU.

``record_step`` runs the package's ``DistributedMuon.step`` for one rank of any exchange plan,
``record_megatron`` Megatron's whole ``optimizer.step()``; each gives a ``Recording`` with
``launches``, ``host_syncs``, ``peak_bytes``, ``collectives`` and ``races``. ``check_stage``
compares the ranks of a stage. ``python -m support.virtual_gpu.report`` prints what
real models' steps cost.

How: tensors say that they are on ``cuda``, so every branch that a run on GPUs takes is taken here,
in the package and in Megatron, which both name that device. They compute on torch's meta device: a
rank of 512 costs milliseconds. What stands in a CPU build's way is the C++ device guard, which
``guard`` registers in two lines (g++, about a second, once). A PrivateUse1 device in pure Python
would need no compiler, but has another name: each ``device="cuda"``, ``Tensor.type()`` and
``is_cuda`` of Megatron would be replaced, and that code would go untested. Torch's FakeTensor needs
the guard as well, does not follow ``.data`` and takes five to ten times as long.

Seams: torch's dispatch (``gpu``), ``torch.cuda`` (``cuda``), ``torch.distributed``
(``communication``). They write a ``trace``; ``races``, ``memory``, ``recording`` and ``stage`` only
read it. Nothing private of the package's exchange is named.

Not modelled: elements, the time that anything takes, NCCL's own resources, cuBLAS' workspaces,
fragmentation of the allocator, CUDA graphs, and streams that C++ takes by itself (autograd's).
"""

from support.virtual_gpu.megatron import Run, record_megatron
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.stage import check_stage
from support.virtual_gpu.step import record, record_step

__all__ = ["Recording", "Run", "check_stage", "record", "record_megatron", "record_step"]
