#!/usr/bin/env bash
# Runs the tests in an environment of their own. `bash tests/run.sh` runs those of training
# with the megatron-core of requirements.txt, then tests/cores, which every core is held to, with each of
# cores.txt. `bash tests/run.sh lab` runs the others: of commands, at models' real sizes, and on the
# virtual GPU. `bash tests/run.sh te` runs the lines of te.txt, over Transformer Engine's Python.
# `bash tests/run.sh kernels` runs those of training that compare numbers once by each of five kinds of
# kernels, whose roundings differ; `bash tests/run.sh kernels MKL_CBWR=COMPATIBLE` by one kind.
# `bash tests/run.sh ARGS` hands its arguments to one pytest, `CORE=0.12.3 bash tests/run.sh ARGS`
# with another core (or with a checkout, by its path), and `TE=2.12.0 bash tests/run.sh ARGS` over the
# Python of that Transformer Engine. Two files run side by side where it chooses the tests itself, and
# where the first of ARGS is a folder. A file has up to eight ranks, so a third gains nothing on two
# cores and has ranks wait longer, up to their timeouts. No file's tests are parted. WORKERS=4 takes
# four; 0 runs one after another, as --pdb and -s want it.
# Makes .venv-tests/ at the first call (Python 3.10 or newer, about 450 MB of downloads with a CPU
# build of torch); pip's own environment variables and configuration are honoured.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${VENV:-.venv-tests}"
PYTHON="${PYTHON:-python3}"

install_core() { # install_core "megatron-core==VERSION OTHERS", in a folder for PYTHONPATH
    local core="${1%% *}" # a range of Python versions is no obstacle: see cores.txt
    # shellcheck disable=SC2086
    "$VENV/bin/python" -m pip install --quiet --no-deps --ignore-requires-python \
        --target "$VENV/cores/${core#*==}" $1
}

install_te() { # install_te VERSION: its Python, and what that imports, in folders for PYTHONPATH
    local pip=("$VENV/bin/python" -m pip install --quiet --no-deps --target)
    if ! cmp --silent "$VENV/te/imports/.installed" tests/requirements-te.txt; then
        rm -rf "$VENV/te/imports"
        "${pip[@]}" "$VENV/te/imports" -r tests/requirements-te.txt
        cp tests/requirements-te.txt "$VENV/te/imports/.installed"
    fi
    if [[ ! -e $VENV/te/$1/.installed ]]; then
        "${pip[@]}" "$VENV/te/$1" "transformer_engine==$1"
        touch "$VENV/te/$1/.installed"
    fi
}

# The stamp holds what was installed, so an interrupted or outdated environment is made again.
wanted="$(cat tests/requirements.txt tests/cores.txt setup.py)"
if [[ "$(cat "$VENV/.installed" 2>/dev/null || true)" != "$wanted" ]]; then
    echo "tests: making $VENV"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet -r tests/requirements.txt
    "$VENV/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
    while read -r line; do install_core "$line"; done < <(grep -v '^#' tests/cores.txt)
    printf '%s' "$wanted" >"$VENV/.installed"
fi

run() { # run CORE ARGS: the installed core where CORE is empty; over TE's Python if that is set
    local core="$1" folder path="" status=0
    local -a folders=()
    shift
    if [[ $core == */* ]]; then
        folders+=("$core")
    elif [[ -n $core ]]; then
        folders+=("$VENV/cores/$core")
    fi
    if [[ -n ${TE:-} ]]; then
        install_te "$TE"
        folders+=("$VENV/te/$TE" "$VENV/te/imports")
    fi
    [[ -z ${APEX_PATH:-} ]] || folders+=("$APEX_PATH") # a clone, of which the Python is enough
    for folder in ${folders[@]+"${folders[@]}"}; do
        path="$path$(cd "$folder" && pwd):"
    done
    local -x PYTHONPATH="$path${PYTHONPATH:-}"
    local -x MEGATRON_MUON_TESTS="$$-$BASHPID-$RANDOM" # all that these tests start has it
    "$VENV/bin/python" -m pytest -m "${MARKERS:-not slow}" "$@" || status=$?
    "$VENV/bin/python" tests/support/left_running.py "$MEGATRON_MUON_TESTS" || status=1
    return "$status"
}

over_te() { # the lines of te.txt
    local installed TE core tests
    installed="$(sed -n 's/^megatron-core==//p' tests/requirements.txt)"
    while read -r TE core tests; do
        echo "tests: over the Python of transformer_engine $TE, with megatron-core $core"
        [[ $core != "$installed" ]] || core=""
        # shellcheck disable=SC2086
        run "$core" "${SIDE_BY_SIDE[@]}" $tests </dev/null
    done < <(grep -v '^#' tests/te.txt)
}

over_cores() { # what needs another core: two side by side, whose ranks wait less than those of four
    local others failed=0
    others="$(mktemp)"
    more_cores | sed 1,2d | one_after_another >"$others" 2>&1 &
    more_cores | sed -n 1,2p | one_after_another || failed=1
    wait $! || failed=1
    cat "$others"
    rm "$others"
    return "$failed"
}

by_kernels() { # by_kernels VARIABLE=VALUE ...: the tests of NUMBERS by the kernels that each asks for
    local kernels output failed=0
    output="$(mktemp)"
    local -x OMP_WAIT_POLICY=passive # a thread that waits leaves its core to other ranks
    for kernels in "$@"; do
        {
            echo "tests: $kernels"
            export "${kernels?}"
            run "" -q "${SIDE_BY_SIDE[@]}" "${NUMBERS[@]}"
        } | tee -a "$output" || failed=1
    done
    grep -E '^tests: |[0-9] (passed|failed).* in ' "$output"
    rm "$output"
    return "$failed"
}

one_after_another() { # lines of CORE TESTS from the input, also after one that fails
    local core tests failed=0
    while read -r core tests; do
        echo "tests: with megatron-core $core, $tests"
        # shellcheck disable=SC2086
        run "$core" $tests </dev/null || failed=1
    done
    return "$failed"
}

more_cores() { # lines of CORE TESTS: tests/cores with each, triton's kernels with the triton of one
    sed -n 's/^megatron-core==\([0-9.]*\).*/\1 tests\/cores/p' tests/cores.txt
    echo 0.19.0 tests/unit/runtime/test_fused.py
}

export OMP_NUM_THREADS=1
# Files in their own order: tests/unit, whose tests are short, leaves neither idle at the end.
SIDE_BY_SIDE=(-n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder)
LAB=(tests/models tests/gpu tests/megatron_lm/test_{compare,ladder}.py tests/ranks/test_pricing_processes.py
    tests/cli/{accept,bench,curves,inspect,plan,routes,trace} tests/cli/test_{arguments,doctor,interrupts}.py)
# Tests that compare a result with an expected one, or with that of another topology.
NUMBERS=(tests/ranks/{results,step,watching,cpu} tests/ranks/test_{grad_norm,counted_once}.py
    tests/unit/orthogonalize)
KERNELS=(MEGATRON_MUON_THREADS={1,2} ATEN_CPU_CAPABILITY={default,avx2} MKL_CBWR=COMPATIBLE)
if [[ $* == --mass ]]; then # size and style of code and documents beside a table of sizes
    PYTHONPATH="tests:${PYTHONPATH:-}" exec "$VENV/bin/python" -m support.mass
elif [[ $* == te ]]; then
    over_te
    exit
elif [[ ${1:-} == kernels ]]; then
    shift
    (($#)) || set -- "${KERNELS[@]}"
    by_kernels "$@"
    exit
elif [[ $* == lab ]]; then
    run "" "${SIDE_BY_SIDE[@]}" "${LAB[@]}"
    exit
elif [[ -d ${1:-} ]]; then
    run "${CORE:-}" "${SIDE_BY_SIDE[@]}" "$@"
    exit
elif (($#)); then
    run "${CORE:-}" "$@"
    exit
fi
# on the installed core the claims of test_versions.py are those of tests/ranks, in more cases
run "" "${SIDE_BY_SIDE[@]}" --ignore tests/cores/test_versions.py "${LAB[@]/#/--ignore=}"
over_cores
