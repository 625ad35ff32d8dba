"""Small GPTs whose training steps are recorded on a virtual GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_muon.settings.config import MuonConfig
from support.virtual_gpu.plans import flags_of
from support.virtual_gpu.recording import Recording


@dataclass(frozen=True, slots=True)
class Run:
    """A small GPT."""

    tp: int = 1  # sizes of the groups; the world is their product
    dp: int = 2
    ep: int = (
        1  # over how many ranks experts are spread, and how many there are; 0: dense
    )
    experts: int = 0
    instances: int = 1  # of the distributed optimizer
    overlap: bool = True  # gradients' reduction and parameters' gather beside compute
    layers: int = 2
    hidden: int = 64
    buckets: int = 3  # of a rank's gradients, with overlap
    clip: float = 1.0  # gradients' norm above which they are scaled; 0: never
    optimizer: Literal["muon", "adam"] = "muon"  # ``adam`` is Megatron untouched

    @property
    def world(self) -> int:
        return self.tp * self.dp

    def words(self) -> list[str]:
        """Megatron-LM's flags."""
        words = (
            f"--num-layers {self.layers} --hidden-size {self.hidden} "
            "--num-attention-heads 4 --group-query-attention --num-query-groups 2 "
            "--swiglu --normalization RMSNorm --disable-bias-linear "
            "--untie-embeddings-and-output-weights --vocab-size 256 "
            "--position-embedding-type rope --max-position-embeddings 64 --bf16 "
            f"--tensor-model-parallel-size {self.tp} --world-size {self.world} "
            f"--num-distributed-optimizer-instances {self.instances} "
            "--use-distributed-optimizer"
        )
        if self.experts:
            words += f" --num-experts {self.experts} --moe-ffn-hidden-size 48"
            words += (
                f" --expert-model-parallel-size {self.ep} "
                "--expert-tensor-parallel-size 1"
            )
        if self.overlap:
            words += " --overlap-grad-reduce --overlap-param-gather"
            words += f" --ddp-num-buckets {self.buckets}"
        return words.split()


def record_megatron(
    run: Run, rank: int, config: MuonConfig | None = None, *, steps: int = 2
) -> Recording:
    """The recording that ``record_training`` makes of a run."""
    from support.virtual_gpu.dry_run import ranks_of
    from support.virtual_gpu.megatron import OptimizerSettings, record_training

    flags = flags_of(run.words())
    training = OptimizerSettings(run.optimizer, run.clip, steps)
    trained = record_training(
        flags, ranks_of(flags), rank, config or MuonConfig(), training
    )
    return trained.recording
