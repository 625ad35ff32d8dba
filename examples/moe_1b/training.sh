#!/usr/bin/env bash
# The 1B mixture-of-experts comparison of NVIDIA/Megatron-LM's pull request 1428, with what its
# discussion arrived at; OPTIMIZER=adam is the AdamW side of it. See README.md.
#   MEGATRON_LM_PATH=.../Megatron-LM [OPTIMIZER=adam] [SMOKE=1] bash training.sh [Megatron's flags]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../start.sh" # finds Megatron-LM and this clone

if [[ $SMOKE == 1 ]]; then # sizes for 2 processes on 2 CPU cores
  LAYERS=${LAYERS:-4} DENSE_LAYERS=${DENSE_LAYERS:-1} HIDDEN=${HIDDEN:-64} FFN=${FFN:-128}
  HEADS=${HEADS:-4} HEAD_SIZE=${HEAD_SIZE:-16} VOCAB_SIZE=${VOCAB_SIZE:-4351}
  EXPERTS=${EXPERTS:-8} TOPK=${TOPK:-2} EXPERT_FFN=${EXPERT_FFN:-32} SEQ_LENGTH=${SEQ_LENGTH:-64}
  MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-4} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-16}
  TRAIN_TOKENS=${TRAIN_TOKENS:-8192} LR=${LR:-1e-2} EVAL_ITERS=${EVAL_ITERS:-1} # 8 iterations
  GPUS_PER_NODE=${GPUS_PER_NODE:-2}
fi

OPTIMIZER=${OPTIMIZER:-muon} # or adam: everything else is the same
LAYERS=${LAYERS:-18} DENSE_LAYERS=${DENSE_LAYERS:-2} HIDDEN=${HIDDEN:-728} FFN=${FFN:-2176}
HEADS=${HEADS:-8} HEAD_SIZE=${HEAD_SIZE:-128} VOCAB_SIZE=${VOCAB_SIZE:-60415} # NullTokenizer adds 1
EXPERTS=${EXPERTS:-64} TOPK=${TOPK:-6} SHARED_EXPERTS=${SHARED_EXPERTS:-2}
EXPERT_FFN=${EXPERT_FFN:-408} # of each expert, routed or shared
SEQ_LENGTH=${SEQ_LENGTH:-2048} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-1152} # or 8192 and 288
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1} TRAIN_TOKENS=${TRAIN_TOKENS:-100000000000}
LR=${LR:-1e-3} MIN_LR=${MIN_LR:-1e-4} TP=${TP:-1} PP=${PP:-1} EP=${EP:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8} NNODES=${NNODES:-1} NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost} MASTER_PORT=${MASTER_PORT:-6000}
SPLIT=${SPLIT:-990,9,1} # training, validation, test; or VALID_DATA_PATH
DATA_PATH=${DATA_PATH:-} SAVE=${SAVE:-} TENSORBOARD_DIR=${TENSORBOARD_DIR:-} # empty data: mock data
TOKENIZER=${TOKENIZER:---tokenizer-type NullTokenizer --vocab-size $VOCAB_SIZE}
samples=$((TRAIN_TOKENS / SEQ_LENGTH))

case $OPTIMIZER in
  muon) optimizer="--optimizer muon --muon-matched-adamw-rms 0.2" ;;
  adam) optimizer="--optimizer adam" ;;
  *) echo "OPTIMIZER is muon or adam, not '$OPTIMIZER'" >&2 && exit 2 ;;
esac
ARGS=(
  --num-layers "$LAYERS" --hidden-size "$HIDDEN" --ffn-hidden-size "$FFN"
  --num-attention-heads "$HEADS" --kv-channels "$HEAD_SIZE" --qk-layernorm --disable-bias-linear
  --swiglu --normalization RMSNorm --position-embedding-type rope --rotary-percent 0.5
  --untie-embeddings-and-output-weights
  --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" --init-method-std 0.006
  --hidden-dropout 0 --attention-dropout 0 --transformer-impl transformer_engine $TOKENIZER
  --num-experts "$EXPERTS" --moe-layer-freq "([0]*$DENSE_LAYERS+[1]*$((LAYERS - DENSE_LAYERS)))"
  --moe-router-topk "$TOPK" --moe-ffn-hidden-size "$EXPERT_FFN"
  --moe-shared-expert-intermediate-size $((SHARED_EXPERTS * EXPERT_FFN)) --moe-shared-expert-overlap
  --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.45
  --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
  --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall
  --moe-grouped-gemm --moe-permute-fusion
  $optimizer --weight-decay-all-params --use-distributed-optimizer --overlap-grad-reduce
  --lr "$LR" --min-lr "$MIN_LR"
  --lr-decay-style cosine --lr-decay-samples $((samples * 98 / 100))
  --lr-warmup-samples $((samples / 100)) --weight-decay 0.1 --clip-grad 1.0 --bf16
  --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --train-samples "$samples"
  --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE"
  --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
  --expert-model-parallel-size "$EP" --distributed-backend nccl --manual-gc
  --log-interval 1 --eval-interval 1000 --eval-iters "${EVAL_ITERS:-10}"
)
start "$@"
