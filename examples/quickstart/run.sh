#!/usr/bin/env bash
# From a fresh clone to GPT pretraining with Distributed Muon, beside AdamW, in one command.
#
# Trains a small byte-level GPT (megatron-core's model, schedules, DDP and distributed optimizer) on
# the source text of this Python's standard library, twice: with Muon, then with AdamW, from the same
# weights, over the same data, each at its own best learning rate (see sweep.py).
#
# Machine: Python 3.11, 2 cores, 8 GB of memory, 2 GB of disk. No GPU is needed and none is used.
# Takes:   about 5 minutes on 2 cores, after the first run's installs into .venv.
# Leaves:  loss.png, summary.json, both runs' curves and TensorBoard logs in examples/quickstart/out.
#
# Change what it does with environment variables, for example: TP=1 PP=1 DP=2 run.sh
# or with train.py's flags, which go to both runs:             run.sh --overlap-grad-reduce
# SMOKE=1 run.sh takes 40 steps in place of 320, about a minute and a half after the installs.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
here=$root/examples/quickstart

TP=${TP:-2} PP=${PP:-2} DP=${DP:-2}           # tensor, pipeline and data parallel sizes
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-$((16 / DP))} # two micro-batches of the 32 samples
MUON_LR=${MUON_LR:-1e-2}                      # see figures/sweep.json
ADAM_LR=${ADAM_LR:-2e-3}
SEED=${SEED:-1234}
OUT=${OUT:-$here/out}
VENV=${VENV:-$root/.venv}
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}

install() { # Makes or completes the environment; the stamp says for which clone and which pins.
  local wanted stamp=$VENV/quickstart.stamp
  wanted="$root"$'\n'"$(cat "$here/requirements.txt" "$root/setup.py")"
  if [[ -x $VENV/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    return
  fi
  if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "$PYTHON is not Python 3.10 or newer: name one, PYTHON=... bash $0" >&2 && exit 2
  fi
  echo "Installing into $VENV (torch's CPU build is a download of about 200 MB; a CUDA build" \
    "is gigabytes)"
  "$PYTHON" -m venv "$VENV"
  "$VENV/bin/python" -m pip install -r "$here/requirements.txt"
  "$VENV/bin/python" -m pip install --quiet --no-deps -e "$root"
  printf '%s\n' "$wanted" >"$stamp"
}

train() { # train NAME OPTIMIZER LR [FLAGS]
  local name=$1 optimizer=$2 lr=$3
  shift 3
  rm -rf "$OUT/tensorboard/$name" "$OUT/$name.json"
  "$VENV/bin/python" -m torch.distributed.run --standalone --nproc-per-node $((TP * PP * DP)) \
    "$here/train.py" "@$here/gpt.args" \
    --tensor-model-parallel-size "$TP" \
    --pipeline-model-parallel-size "$PP" \
    --micro-batch-size "$MICRO_BATCH_SIZE" \
    --optimizer "$optimizer" \
    --lr "$lr" \
    --seed "$SEED" \
    --tensorboard-dir "$OUT/tensorboard/$name" \
    --figures "$OUT/$name.json" \
    "$@"
}

if [[ ${SMOKE:-0} == 1 ]]; then # the same in 40 of the 320 steps; the losses then say little
  set -- --train-iters 40 "$@"
fi
install
export OMP_NUM_THREADS=1     # one thread for each process
export CUDA_VISIBLE_DEVICES= # the same run with and without a GPU
mkdir -p "$OUT"
started=$SECONDS
train muon muon "$MUON_LR" "$@"
train adamw adam "$ADAM_LR" "$@"
"$VENV/bin/python" "$here/summary.py" "$OUT/muon.json" "$OUT/adamw.json" --out "$OUT"
echo "Took $((SECONDS - started)) s after the installs."
