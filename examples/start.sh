# Sourced by each training.sh: what they have in common before and after their own arguments.
here=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd) # the folder of the script that sources this
if [[ ! -f ${MEGATRON_LM_PATH:-}/pretrain_gpt.py ]]; then
  echo "MEGATRON_LM_PATH='${MEGATRON_LM_PATH:-}' is no Megatron-LM checkout. Get one and name it:" \
    "git clone --depth 1 -b core_v0.16.1 https://github.com/NVIDIA/Megatron-LM" >&2
  exit 2
fi
export PYTHONPATH=${here%/examples/*}${PYTHONPATH:+:$PYTHONPATH} # this clone's megatron_muon
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
SMOKE=${SMOKE:-0}
if [[ $SMOKE == 1 ]]; then # the same training on CPUs, at the sizes that each script sets for it
  export OMP_NUM_THREADS=1 # a thread a process, since there are more processes than cores
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} # one machine; gloo then needs no host name
fi

# Starts Megatron-LM's script on this node with the array ARGS, then the flags given here.
start() {
  if [[ -n ${VALID_DATA_PATH:-} ]]; then # a loss for each of its files, from core 0.14 on
    ARGS+=(--train-data-path $DATA_PATH --valid-data-path $VALID_DATA_PATH)
    ARGS+=(--multiple-validation-sets --full-validation)
  else
    [[ -n $DATA_PATH ]] && ARGS+=(--data-path $DATA_PATH) || ARGS+=(--mock-data)
    ARGS+=(--split "$SPLIT")
  fi
  [[ -z $SAVE ]] || ARGS+=(--save "$SAVE" --load "$SAVE" --save-interval "${SAVE_INTERVAL:-1000}")
  [[ -z $TENSORBOARD_DIR ]] || ARGS+=(--tensorboard-dir "$TENSORBOARD_DIR")
  [[ $SMOKE != 1 ]] || ARGS+=(--muon-cpu) # replaces what only a GPU has, and prints each
  exec torchrun --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    -m megatron_muon "$MEGATRON_LM_PATH/pretrain_gpt.py" "${ARGS[@]}" "$@"
}
