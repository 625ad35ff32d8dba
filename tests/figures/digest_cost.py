"""What a checkpoint's digest costs.

``cd tests && python -m figures.digest_cost [MB of a rank's state]``.

Two ranks save as much, in torch_dist and in the old format, take the digest's checksums of what
they wrote, and check them as before a load. Printed are seconds and the share of the save's, in
wall and in processor time: the median of several saves.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SAVES = 5


def measured(megabytes: int, folder: str, format: str) -> list[tuple[float, ...]]:
    """On a rank: seconds of each save, of its processor; of the digest, of its processor; of the
    check."""
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    from megatron_muon.mcore.load_check.checksum import checksum
    from megatron_muon.mcore.load_check.save import just_written

    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = {f"t{i}": torch.randn(megabytes * 2**18 // 20) for i in range(20)}
    trials = []
    for _ in range(SAVES):
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder)
        dist.barrier()
        start, processor = time.perf_counter(), _processor()
        if format == "torch":
            torch.save(tensors, f"{folder}/{rank}.pt")
            names = [f"{rank}.pt"]
        else:
            state = {
                key: ShardedTensor.from_rank_offsets(key, tensor, (0, rank, size))
                for key, tensor in tensors.items()
            }
            dist_checkpointing.save(state, folder)
            names = [path.name for path in Path(folder).glob(f"__{rank}_*")]
        dist.barrier()
        saved, saved_processor = time.perf_counter(), _processor()
        for name in names:
            just_written(Path(folder) / name)
        dist.barrier()
        hashed, hashed_processor = time.perf_counter(), _processor()
        for name in names:
            checksum(Path(folder, name))
        dist.barrier()
        checked = time.perf_counter() - hashed
        spent = hashed_processor - saved_processor
        trials.append((saved - start, saved_processor - processor, hashed - saved, spent, checked))
    return trials


def _processor() -> float:
    """Of this process and those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main(megabytes: int) -> None:
    from support.ranks import run

    function: Any = sys.modules["digest_cost"].measured
    for format in ("torch_dist", "torch"):
        with tempfile.TemporaryDirectory() as folder:
            (first, _) = run(function, 2, megabytes, f"{folder}/saved", format, timeout=900.0)
        save, save_cpu, digest, digest_cpu, check = (
            statistics.median(values) for values in zip(*first, strict=True)
        )
        print(
            f"{format}: {megabytes} MB of each of 2 ranks: save {save:.2f} s (processor "
            f"{save_cpu:.2f} s), digest {digest:.3f} s ({digest_cpu:.3f} s): "
            f"{digest / save:.1%} of the save's time ({digest_cpu / save_cpu:.1%}); "
            f"the check before a load {check:.2f} s"
        )


if __name__ == "__main__":
    from figures import digest_cost

    digest_cost.main(int(sys.argv[1]) if len(sys.argv) > 1 else 250)
