#!/usr/bin/env bash
# Runs the tests of the training scripts over several Megatron-LM checkouts, one after the other, and
# prints how each test ended: `bash tests/versions.sh [--options] CHECKOUT [CHECKOUT ...] [-- ARGS]`;
# with --options those of Megatron-LM's options. ARGS are pytest's. Uses the environment of
# tests/run.sh with tests/requirements-pretrain.txt installed into it, or the Python of TEST_PYTHON.
set -euo pipefail
PYTHON="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && realpath --no-symlinks "${TEST_PYTHON:-${VENV:-.venv-tests}/bin/python}")"
TESTS="$(realpath "$(dirname "${BASH_SOURCE[0]}")")/megatron_lm"
export OMP_NUM_THREADS=1

files=("$TESTS"/pretrain/test_pretrain{,_oracle}.py "$TESTS"/checkpoints/test_pretrain_{saved,resume}.py)
if [[ ${1:-} == --options ]]; then
    files=("$TESTS/pretrain/test_pretrain_options.py")
    shift
fi
checkouts=()
while (($#)) && [[ $1 != -- ]]; do
    checkouts+=("$(realpath "$1")")
    shift
done
((${#checkouts[@]})) || { echo "give a Megatron-LM checkout" >&2; exit 2; }
cd "$TESTS/../.."
failed=0
for checkout in "${checkouts[@]}"; do
    echo "tests: $checkout"
    MEGATRON_LM_PATH="$checkout" "$PYTHON" -m pytest -v -rs "${files[@]}" "${@:2}" || failed=1
done
exit "$failed"
