"""Torch's internals that a run uses: names that a release may change without notice."""

from megatron_muon.mcore.seams.row import Place

_TORCH = Place("torch")
_C10D = Place("torch.distributed.distributed_c10d")
ROWS = (
    *(
        _TORCH.called(f"_foreach_{name}", "one kernel for a list of tensors")
        for name in ("add_", "copy_", "mul", "mul_", "norm", "sub_")
    ),
    _C10D.called("_get_default_store", "where the first rank to compare settings says if it asks"),
    Place("torch._C").called("PyTorchFileReader", "reads the archives that torch.save writes"),
    Place("torch.autograd").called(
        "_profiler_enabled", "whether a profiler of torch is on already"
    ),
)
