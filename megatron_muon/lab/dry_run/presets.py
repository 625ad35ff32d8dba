"""Published models by name, as words of ``flags``; sources are the models' own
configurations.
"""

from __future__ import annotations

_COMMON = (
    "--swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --bf16 "
    "--use-distributed-optimizer "
)
_LLAMA = _COMMON + (
    "--group-query-attention --num-query-groups 8 --vocab-size 128256 --seq-length "
    "8192 --max-position-embeddings 8192 "
)
_MOE = _COMMON + "--expert-tensor-parallel-size 1 "
_LATENT = _MOE + (
    "--multi-latent-attention --qk-layernorm --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 "
)
PRESETS = {
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B, -70B; Llama-3.1-405B
    "llama3-8b": _LLAMA
    + (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
        "--num-attention-heads 32"
    ),
    "llama3-70b": _LLAMA
    + (
        "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 "
        "--num-attention-heads 64"
    ),
    "llama3-405b": _LLAMA
    + (
        "--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 "
        "--num-attention-heads 128"
    ),
    # https://huggingface.co/Qwen/Qwen3-30B-A3B
    "qwen3-30b-a3b": _MOE + "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 "
    "--num-attention-heads 32 --kv-channels 128 --group-query-attention "
    "--num-query-groups 4 --qk-layernorm --padded-vocab-size 151936 --num-experts 128 "
    "--moe-ffn-hidden-size 768 --moe-router-topk 8 --seq-length 4096 "
    "--max-position-embeddings 4096",
    # https://huggingface.co/moonshotai/Moonlight-16B-A3B
    "moonlight-16b-a3b": _LATENT
    + "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264 "
    "--num-attention-heads 16 --padded-vocab-size 163840 --num-experts 64 "
    "--moe-ffn-hidden-size 1408 --moe-router-topk 6 "
    "--moe-shared-expert-intermediate-size 2816 --moe-layer-freq ([0]*1+[1]*26) "
    "--seq-length 8192",
    # https://huggingface.co/deepseek-ai/DeepSeek-V3; batch: arXiv 2412.19437, section
    # 4.2
    "deepseek-v3": _LATENT
    + "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 "
    "--num-attention-heads 128 --q-lora-rank 1536 --vocab-size 129280 --num-experts "
    "256 --moe-ffn-hidden-size 2048 --moe-router-topk 8 "
    "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) "
    "--seq-length 4096 --global-batch-size 15360",
    # https://huggingface.co/moonshotai/Kimi-K2-Base; 67 M tokens a step: arXiv
    # 2507.20534
    "kimi-k2": _LATENT + "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 "
    "--num-attention-heads 64 --q-lora-rank 1536 --padded-vocab-size 163840 "
    "--num-experts 384 --moe-ffn-hidden-size 2048 --moe-router-topk 8 "
    "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*1+[1]*60) "
    "--seq-length 4096 --global-batch-size 16384",
}
