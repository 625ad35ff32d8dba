"""Megatron's flags for whole models: what ``megatron-muon routes`` is given, what runs
save.
"""

from __future__ import annotations

from megatron_muon.lab.dry_run.presets import PRESETS
from support.runs.cases import (
    EXPERTS,
    HEAD_SIZE,
    HIDDEN,
    KV_RANK,
    MOE_FFN,
    Q_RANK,
    ROPE_HEAD,
    SEQUENCE,
    SHARED_FFN,
    VOCAB,
    Case,
    Topology,
)

TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --bf16 "
    "--position-embedding-type rope --transformer-impl local "
    "--use-distributed-optimizer"
).split()
LLAMA_3_8B = PRESETS["llama3-8b"].split()
DEEPSEEK_V3 = (
    PRESETS["deepseek-v3"].partition("--global-batch-size")[0]
    + "--pipeline-model-parallel-size 16 --decoder-last-pipeline-num-layers 1 "
    "--expert-model-parallel-size 64 --world-size 1024"
).split()


def flags_of(case: Case, topology: Topology) -> list[str]:
    """Megatron's flags for the model and the ranks that ``gpt.build`` makes."""
    words = (
        f"--num-layers {case.layers} --hidden-size {HIDDEN} --ffn-hidden-size {case.ffn} "
        f"--num-attention-heads {case.heads} --seq-length {SEQUENCE} "
        f"--vocab-size {VOCAB} --make-vocab-size-divisible-by 1 "
        "--position-embedding-type rope --transformer-impl local "
        "--use-distributed-optimizer --bf16 "
        f"--tensor-model-parallel-size {topology.tp} "
        f"--context-parallel-size {topology.cp} "
        f"--pipeline-model-parallel-size {topology.pp} "
        f"--world-size {topology.world_size} "
        f"--num-distributed-optimizer-instances {topology.instances} "
    )
    words += "--sequence-parallel " * topology.sequence_parallel
    words += "--swiglu " * case.gated
    words += "--untie-embeddings-and-output-weights " * (not case.tied)
    if topology.chunks > 1:
        words += f"--num-virtual-stages-per-pipeline-rank {topology.chunks} "
    if topology.overlap:
        words += "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000 "
    if case.moe:
        words += (
            f"--num-experts {EXPERTS} --moe-ffn-hidden-size {MOE_FFN} "
            f"--moe-shared-expert-intermediate-size {SHARED_FFN} "
            f"--disable-bias-linear --expert-model-parallel-size {topology.ep} "
            f"--expert-tensor-parallel-size {topology.expert_tp} "
        )
    if case.mla:
        words += (
            f"--multi-latent-attention --q-lora-rank {Q_RANK} --kv-lora-rank {KV_RANK} "
            f"--qk-head-dim {HEAD_SIZE} --v-head-dim {HEAD_SIZE} --qk-layernorm "
            f"--qk-pos-emb-head-dim {ROPE_HEAD} --normalization RMSNorm "
        )
    else:
        words += f"--group-query-attention --num-query-groups {case.groups} "
    return words.split()
