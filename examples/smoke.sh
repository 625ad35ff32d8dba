# Sourced by each training.sh when SMOKE=1: the same training on CPUs, at the sizes that the script
# sets for it. One list for all examples says what only a GPU has and what stands there instead:
#     what a script gives | the replacement | why
# An empty first column: Megatron has it by default, so a flag is added.
GPU_ONLY=(
  "--distributed-backend nccl|--distributed-backend gloo|NCCL connects GPUs only"
  "--transformer-impl transformer_engine|--transformer-impl local|Transformer Engine's layers are CUDA code"
  "--moe-permute-fusion||the fused permutation of tokens is Transformer Engine's"
  "|--no-gradient-accumulation-fusion|it is a CUDA extension of Apex"
  "|--no-persist-layer-norm|the persistent LayerNorm is Apex's"
  "|--no-masked-softmax-fusion|it is a CUDA kernel"
  "|--no-rope-fusion|it is a kernel of Transformer Engine"
)
# The GPUs are hidden; a thread a process, since there are more processes than cores; no compiler.
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} # one machine; gloo then needs no host name

# Makes the replacements in the array ARGS and prints each that it makes.
replace_gpu_only() {
  local line old new why i
  for line in "${GPU_ONLY[@]}"; do
    IFS='|' read -r old new why <<<"$line"
    set -- $old # its words: a flag and perhaps a value
    if (($# == 0)) && [[ " ${ARGS[*]} " != *" ${new%% *} "* ]]; then
      ARGS+=($new)
      echo "smoke: added $new: $why"
    fi
    for ((i = 0; $# > 0 && i < ${#ARGS[@]}; i++)); do
      [[ "${ARGS[*]:i:$#}" == "$old" ]] || continue
      ARGS=("${ARGS[@]:0:i}" $new "${ARGS[@]:i+$#}")
      echo "smoke: replaced $old by ${new:-nothing}: $why"
    done
  done
}
