"""A GPU that is not there: the real step of any rank, recorded op by op, without a GPU.

``step.record_step`` runs the package's ``DistributedMuon.step`` for one rank of any
exchange plan. ``megatron.record_training`` runs Megatron's whole ``optimizer.step()``.
Each gives a ``Recording`` with ``launches``, ``host_syncs``, ``peak_bytes``,
``collectives`` and ``races``. ``stage.check_stage`` compares ranks. ``verdict`` does so
for ranks of a whole run, and ``report`` prints what a step of real models costs.

How: tensors say that they are on ``cuda``. Both the package and Megatron name that
device, so every branch that a run on GPUs takes is taken here. The tensors compute on
torch's meta device: a rank of 512 costs milliseconds. ``device.guard`` keeps torch's
C++ from asking a driver, so a machine's real GPU is never touched. A PrivateUse1 device
in pure Python would need no guard, but has another name. Each ``device="cuda"``,
``Tensor.type()`` and ``is_cuda`` of Megatron would be replaced, and that code would go
untested. Torch's FakeTensor needs the guard as well, does not follow ``.data`` and
takes five to ten times as long.

Seams: torch's dispatch (``device.gpu``), ``torch.cuda`` (``device.cuda``),
``torch.distributed``
(``device.communication``). They write a ``trace``; ``races``, ``memory``, ``recording``
and ``stage`` only read it. Nothing private of the package's exchange is named.

Not modelled: elements, the time that anything takes, NCCL's own resources, cuBLAS'
workspaces, fragmentation of the allocator, CUDA graphs, and streams that C++ takes by
itself (autograd's).
"""
