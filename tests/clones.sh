#!/usr/bin/env bash
# Clones the projects that tests run beside the plugin, at the commits that were read:
# `eval "$(bash tests/clones.sh FOLDER [NAME ...])"` sets the variables by which tests find them.
# GITHUB names another place with the same paths. None of their code is part of this repository.
set -euo pipefail
trap 'echo false' EXIT # what eval then ends with
folder="$(mkdir -p "${1:?bash tests/clones.sh FOLDER [NAME ...]}" && cd "$1" && pwd)"
shift

known() { # NAME REPOSITORY COMMIT
    cat <<'END'
verl volcengine/verl b178a3cd56f58b2d502255daba591e92833930a7
slime THUDM/slime 624b824a898ab0ec1fcb4d373004c7f3852bf515
miles radixark/miles 31f1ca961a94cb860cec3b2dea34ec332bfa8f76
areal inclusionAI/AReaL 4aef98d8d818af55b43621aaadba047ae10f4e77
bridge NVIDIA-NeMo/Megatron-Bridge 067f987df03b8355b03192d88d70f1709fedf51a
main NVIDIA/Megatron-LM d98e8a64ddf34856e74b24714e3bedb2f5a39553
dev NVIDIA/Megatron-LM d48bd6be0a85cc0d6d3cc71e8750cf357cc6bdb1
radixark radixark/Megatron-LM 2e64d788b67fe8155774200c87606e1e449c494b
flagos flagos-ai/Megatron-LM-FL 175ae90ec92a9e6fea2d74ccd24d6a1835d3ae82
END
}

wanted=" ${*:-$(known | cut -d' ' -f1 | tr '\n' ' ')} "
for name in $wanted; do
    if ! known | grep -q "^$name "; then
        echo "$name is not one of: $(known | cut -d' ' -f1 | tr '\n' ' ')" >&2
        exit 2
    fi
done
while read -r name repository commit; do
    [[ $wanted == *" $name "* ]] || continue
    clone="$folder/$name"
    if [[ "$(git -C "$clone" rev-parse HEAD 2>/dev/null || true)" != "$commit" ]]; then
        git init --quiet "$clone"
        git -C "$clone" fetch --quiet --depth 1 "${GITHUB:-https://github.com}/$repository" "$commit"
        git -C "$clone" checkout --quiet --detach FETCH_HEAD
    fi
    printf 'export %s_PATH=%q\n' "${name^^}" "$clone"
done < <(known)
trap - EXIT
