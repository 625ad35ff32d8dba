"""Megatron's flags for whole models: what ``megatron-muon routes`` is given, what runs save."""

from __future__ import annotations

from typing import Any

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
    "--position-embedding-type rope --transformer-impl local --use-distributed-optimizer"
).split()
LLAMA_3_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --bf16 "
    "--untie-embeddings-and-output-weights --vocab-size 128256 --position-embedding-type rope "
    "--disable-bias-linear --use-distributed-optimizer"
).split()
DEEPSEEK_V3 = (
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --num-experts 256 "
    "--moe-ffn-hidden-size 2048 --moe-router-topk 8 --moe-shared-expert-intermediate-size 2048 "
    "--moe-layer-freq ([0]*3+[1]*58) --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 129280 "
    "--position-embedding-type rope --seq-length 4096 --bf16 --use-distributed-optimizer "
    "--pipeline-model-parallel-size 16 --decoder-last-pipeline-num-layers 1 "
    "--expert-model-parallel-size 64 --expert-tensor-parallel-size 1 --world-size 1024"
).split()


def flags_of(case: Case, topology: Topology) -> list[str]:
    """Megatron's flags for the model and the ranks that ``gpt.build`` makes."""
    words: list[Any] = ["--num-layers", case.layers, "--hidden-size", HIDDEN]
    words += ["--num-attention-heads", case.heads, "--ffn-hidden-size", case.ffn]
    words += ["--seq-length", SEQUENCE]
    words += ["--vocab-size", VOCAB, "--make-vocab-size-divisible-by", 1]
    words += ["--position-embedding-type", "rope"]
    words += ["--transformer-impl", "local", "--use-distributed-optimizer", "--bf16"]
    words += ["--tensor-model-parallel-size", topology.tp, "--context-parallel-size", topology.cp]
    words += ["--pipeline-model-parallel-size", topology.pp, "--world-size", topology.world_size]
    words += ["--num-distributed-optimizer-instances", topology.instances]
    words += ["--sequence-parallel"] * topology.sequence_parallel
    words += ["--swiglu"] * case.gated
    words += ["--untie-embeddings-and-output-weights"] * (not case.tied)
    if topology.chunks > 1:
        words += ["--num-virtual-stages-per-pipeline-rank", topology.chunks]
    if topology.overlap:
        words += ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", 5000]
    if case.moe:
        words += ["--num-experts", EXPERTS, "--moe-ffn-hidden-size", MOE_FFN]
        words += ["--moe-shared-expert-intermediate-size", SHARED_FFN, "--disable-bias-linear"]
        words += ["--expert-model-parallel-size", topology.ep]
        words += ["--expert-tensor-parallel-size", topology.expert_tp]
    if case.mla:
        words += ["--multi-latent-attention", "--q-lora-rank", Q_RANK, "--kv-lora-rank", KV_RANK]
        words += ["--qk-head-dim", HEAD_SIZE, "--v-head-dim", HEAD_SIZE, "--qk-layernorm"]
        words += ["--qk-pos-emb-head-dim", ROPE_HEAD, "--normalization", "RMSNorm"]
    else:
        words += ["--group-query-attention", "--num-query-groups", case.groups]
    return [str(word) for word in words]
