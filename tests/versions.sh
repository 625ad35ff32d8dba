#!/usr/bin/env bash
# Runs the tests of the training scripts over several Megatron-LM checkouts, one after the other,
# and prints a table: `bash tests/versions.sh [--options] CHECKOUT [CHECKOUT ...] [-- pytest arguments]`.
# Uses the environment of tests/run.sh with tests/requirements-pretrain.txt installed into it, or
# the Python named by TEST_PYTHON. What a test prints where it fails goes to stderr.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${TEST_PYTHON:-${VENV:-.venv-tests}/bin/python}"
export OMP_NUM_THREADS=1
exec "$PYTHON" tests/support/megatron_lm/versions.py "$@"
