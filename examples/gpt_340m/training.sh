#!/usr/bin/env bash
# A GPT of 340 M parameters beside its embeddings: the recipe of Distributed Muon's proof of concept
# (pull request 1428 of NVIDIA/Megatron-LM), and with OPTIMIZER=adam its AdamW twin. See README.md.
#   MEGATRON_LM_PATH=.../Megatron-LM [OPTIMIZER=adam] [SMOKE=1] bash training.sh [Megatron's flags]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../start.sh" # finds Megatron-LM and this clone

if [[ $SMOKE == 1 ]]; then # sizes for 8 processes on 2 CPU cores
  LAYERS=${LAYERS:-4} HIDDEN=${HIDDEN:-64} HEADS=${HEADS:-4} SEQ_LENGTH=${SEQ_LENGTH:-64}
  TOKENIZER=${TOKENIZER:---tokenizer-type NullTokenizer --vocab-size 4351}
  MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-4} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-16}
  TRAIN_ITERS=${TRAIN_ITERS:-8} LR=${LR:-1e-2}
  LOG_INTERVAL=${LOG_INTERVAL:-1} EVAL_ITERS=${EVAL_ITERS:-1}
fi

OPTIMIZER=${OPTIMIZER:-muon} # or adam: everything else is the same
LAYERS=${LAYERS:-12} HIDDEN=${HIDDEN:-1536} HEADS=${HEADS:-12} SEQ_LENGTH=${SEQ_LENGTH:-1024}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-64}
TRAIN_ITERS=${TRAIN_ITERS:-5000} LR=${LR:-1e-3} MIN_LR=${MIN_LR:-1e-4}
TP=${TP:-2} PP=${PP:-2} # data parallel: the GPUs of all nodes / (TP * PP)
GPUS_PER_NODE=${GPUS_PER_NODE:-8} NNODES=${NNODES:-1} NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost} MASTER_PORT=${MASTER_PORT:-6000}
SPLIT=${SPLIT:-949,50,1} # training, validation, test; or VALID_DATA_PATH
DATA_PATH=${DATA_PATH:-} # prefix of a tokenised .bin and .idx; empty: mock data
TOKENIZER=${TOKENIZER:---tokenizer-type NullTokenizer --vocab-size 50256} # GPT-2's size
SAVE=${SAVE:-} TENSORBOARD_DIR=${TENSORBOARD_DIR:-}

case $OPTIMIZER in
  muon) optimizer="--optimizer muon --muon-matched-adamw-rms 0.2" ;;
  adam) optimizer="--optimizer adam" ;;
  *) echo "OPTIMIZER is muon or adam, not '$OPTIMIZER'" >&2 && exit 2 ;;
esac
ARGS=(
  --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS"
  --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" --transformer-impl local
  --init-method-std 0.006 $TOKENIZER
  $optimizer --use-distributed-optimizer --lr "$LR" --min-lr "$MIN_LR" --weight-decay 0.1
  --lr-decay-style cosine --lr-decay-iters "$TRAIN_ITERS" --lr-warmup-fraction 0.02
  --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16 --train-iters "$TRAIN_ITERS"
  --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE"
  --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
  --distributed-backend nccl
  --log-interval "${LOG_INTERVAL:-100}" --eval-interval 1000 --eval-iters "${EVAL_ITERS:-10}"
)
start "$@"
