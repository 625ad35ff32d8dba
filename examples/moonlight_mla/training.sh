#!/usr/bin/env bash
# Multi-latent attention and a mixture of experts in the shape and with the schedule of Moonlight
# 16B-A3B (arXiv 2502.16982), scaled by variables; OPTIMIZER=adam for AdamW. See README.md.
#   MEGATRON_LM_PATH=.../Megatron-LM [OPTIMIZER=adam] [SMOKE=1] bash training.sh [Megatron's flags]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../start.sh" # finds Megatron-LM and this clone

if [[ $SMOKE == 1 ]]; then # sizes for 4 processes on 2 CPU cores: TP2, EP4
  LAYERS=${LAYERS:-3} HIDDEN=${HIDDEN:-64} FFN=${FFN:-128} HEADS=${HEADS:-4}
  HEAD_SIZE=${HEAD_SIZE:-16} ROPE_SIZE=${ROPE_SIZE:-8} KV_LORA_RANK=${KV_LORA_RANK:-32}
  EXPERTS=${EXPERTS:-8} TOPK=${TOPK:-2} EXPERT_FFN=${EXPERT_FFN:-32} EP=${EP:-4}
  VOCAB_SIZE=${VOCAB_SIZE:-4351} SEQ_LENGTH=${SEQ_LENGTH:-64} EVAL_ITERS=${EVAL_ITERS:-1}
  MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-4} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-16}
  TRAIN_ITERS=${TRAIN_ITERS:-8} WARMUP_ITERS=${WARMUP_ITERS:-0} LR=${LR:-1e-2}
  GPUS_PER_NODE=${GPUS_PER_NODE:-4}
fi

OPTIMIZER=${OPTIMIZER:-muon} # or adam: everything else is the same
LAYERS=${LAYERS:-27} DENSE_LAYERS=${DENSE_LAYERS:-1} HIDDEN=${HIDDEN:-2048} FFN=${FFN:-11264}
HEADS=${HEADS:-16} HEAD_SIZE=${HEAD_SIZE:-128} ROPE_SIZE=${ROPE_SIZE:-64}
KV_LORA_RANK=${KV_LORA_RANK:-512} VOCAB_SIZE=${VOCAB_SIZE:-163839} # NullTokenizer adds 1
EXPERTS=${EXPERTS:-64} TOPK=${TOPK:-6} SHARED_EXPERTS=${SHARED_EXPERTS:-2}
EXPERT_FFN=${EXPERT_FFN:-1408} SEQ_LENGTH=${SEQ_LENGTH:-8192}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-2048}
TRAIN_ITERS=${TRAIN_ITERS:-10000} WARMUP_ITERS=${WARMUP_ITERS:-2000} # README.md has the paper's
LR=${LR:-4.2e-4} MIN_LR=${MIN_LR:-4.2e-5}
TP=${TP:-2} PP=${PP:-1} EP=${EP:-8} # experts are not split over TP
GPUS_PER_NODE=${GPUS_PER_NODE:-8} NNODES=${NNODES:-1} NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost} MASTER_PORT=${MASTER_PORT:-6000}
SPLIT=${SPLIT:-990,9,1} # training, validation, test; or VALID_DATA_PATH
DATA_PATH=${DATA_PATH:-} SAVE=${SAVE:-} TENSORBOARD_DIR=${TENSORBOARD_DIR:-} # empty data: mock data
TOKENIZER=${TOKENIZER:---tokenizer-type NullTokenizer --vocab-size $VOCAB_SIZE}

case $OPTIMIZER in
  muon) optimizer="--optimizer muon --muon-matched-adamw-rms 0.2" ;;
  adam) optimizer="--optimizer adam" ;;
  *) echo "OPTIMIZER is muon or adam, not '$OPTIMIZER'" >&2 && exit 2 ;;
esac
ARGS=(
  --num-layers "$LAYERS" --hidden-size "$HIDDEN" --ffn-hidden-size "$FFN"
  --num-attention-heads "$HEADS" --multi-latent-attention --kv-lora-rank "$KV_LORA_RANK"
  --qk-head-dim "$HEAD_SIZE" --v-head-dim "$HEAD_SIZE" --kv-channels "$HEAD_SIZE" --qk-layernorm
  --qk-pos-emb-head-dim "$ROPE_SIZE" --position-embedding-type rope --rotary-base 50000
  --rotary-scaling-factor 1 --mscale 1 --mscale-all-dim 1 --no-rope-fusion # YaRN by 1: plain RoPE
  --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --init-method-std 0.02
  --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 $TOKENIZER
  --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
  --transformer-impl transformer_engine
  --num-experts "$EXPERTS" --moe-layer-freq "([0]*$DENSE_LAYERS+[1]*$((LAYERS - DENSE_LAYERS)))"
  --moe-router-topk "$TOPK" --moe-ffn-hidden-size "$EXPERT_FFN" --moe-router-dtype fp32
  --moe-shared-expert-intermediate-size $((SHARED_EXPERTS * EXPERT_FFN)) --moe-shared-expert-overlap
  --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.446
  --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3
  --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion
  $optimizer --weight-decay-all-params --use-distributed-optimizer --overlap-grad-reduce
  --overlap-param-gather --bf16
  --lr "$LR" --min-lr "$MIN_LR" --lr-decay-style cosine --lr-decay-iters "$TRAIN_ITERS"
  --lr-warmup-iters "$WARMUP_ITERS" --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9
  --adam-beta2 0.95 --train-iters "$TRAIN_ITERS" --micro-batch-size "$MICRO_BATCH_SIZE"
  --global-batch-size "$GLOBAL_BATCH_SIZE" --tensor-model-parallel-size "$TP" --sequence-parallel
  --pipeline-model-parallel-size "$PP" --expert-model-parallel-size "$EP"
  --expert-tensor-parallel-size 1 --distributed-backend nccl
  --log-interval 1 --eval-interval 1000 --eval-iters "${EVAL_ITERS:-10}"
)
start "$@"
