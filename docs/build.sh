#!/usr/bin/env bash
# Builds the documents: `bash docs/build.sh [FOLDER]`, by default into a temporary folder that is
# removed again; `bash docs/build.sh serve` shows them at http://127.0.0.1:8000 while you edit.
# A warning is an error. Makes .venv-docs/ at the first call (30 MB of downloads).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${VENV_DOCS:-.venv-docs}"
if [[ "$(cat "$VENV/.installed" 2>/dev/null || true)" != "$(cat docs/requirements.txt)" ]]; then
    echo "docs: making $VENV"
    rm -rf "$VENV"
    "${PYTHON:-python3}" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet -r docs/requirements.txt
    cp docs/requirements.txt "$VENV/.installed"
fi

"$VENV/bin/python" docs/generate.py --check
export NO_MKDOCS_2_WARNING=1 # the pinned release is the one we mean
if [[ "${1:-}" == serve ]]; then
    exec "$VENV/bin/python" -m mkdocs serve
fi
site="${1:-}"
if [[ -z $site ]]; then
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
fi
"$VENV/bin/python" -m mkdocs build --strict --site-dir "$site" # with --quiet it counts no warnings
