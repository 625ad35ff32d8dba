#!/usr/bin/env bash
# Runs the tests in an environment of their own: `bash tests/run.sh [pytest arguments]`.
# Makes .venv-tests/ at the first call (Python 3.10 or newer, about 250 MB of downloads with a CPU
# build of torch); pip's own environment variables and configuration are honoured.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${VENV:-.venv-tests}"
PYTHON="${PYTHON:-python3}"

# The stamp holds what was installed, so an interrupted or outdated environment is made again.
wanted="$(cat tests/requirements.txt setup.py)"
if [[ "$(cat "$VENV/.installed" 2>/dev/null || true)" != "$wanted" ]]; then
    echo "tests: making $VENV"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet -r tests/requirements.txt
    "$VENV/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
    printf '%s' "$wanted" >"$VENV/.installed"
fi

export OMP_NUM_THREADS=1
exec "$VENV/bin/python" -m pytest -m "${MARKERS:-not slow}" "$@"
