"""Flags of models and modules that ``megatron-muon routes`` does not build, and why.

Each would change which parameters there are, or which of them are trained. Sources: Megatron-LM's
parsers at core_v0.12.3 to core_v0.19.0 and main, pretrain_vlm.py and examples/multimodal, and
megatron/post_training.
"""

from __future__ import annotations

import re

_NO_BUILD = "the model is built by GPTModel or by the hybrid model from flags alone"
_NO_GTP = "optimizer='muon' does not support generalized tensor parallelism yet"
_TE_ONLY = "the model is built from Megatron's local modules, and only Transformer Engine's have it"
REFUSED = {
    "--heterogeneous-layers-config-path": _NO_BUILD,
    "--heterogeneous-layers-config-encoded-json": _NO_BUILD,
    "--yaml-cfg": _NO_BUILD,
    "--use-checkpoint-args": f"{_NO_BUILD}: give those that the checkpoint was trained with",
    "--use-legacy-models": _NO_BUILD,
    "--encoder-num-layers": "give --num-layers",
    "--decoder-num-layers": "give --num-layers",
    "--encoder-seq-length": "give --seq-length",
    "--model-parallel-size": "give --tensor-model-parallel-size",
    "--kitchen-config-file": _NO_BUILD,
    "--kitchen-recipe-number": _NO_BUILD,
    "--use-mp-args-from-checkpoint-args": "give the parallel sizes",
    "--use-torch-fsdp2": "optimizer='muon' does not support torch FSDP2 yet",
    "--use-custom-fsdp": "optimizer='muon' does not support Megatron-FSDP yet",
    "--encoder-tensor-model-parallel-size": _NO_BUILD,
    "--encoder-pipeline-model-parallel-size": _NO_BUILD,
    "--pipeline-model-parallel-split-rank": _NO_BUILD,
    "--tensor-parallel-num-weight-shards": _NO_GTP,
    "--expert-tensor-parallel-num-weight-shards": _NO_GTP,
    "--mla-down-proj-fusion": _TE_ONLY,
    "--use-grouped-gemm-for-dense-mlp": _TE_ONLY,
    "--use-grouped-gemm-for-shared-expert": _TE_ONLY,
}
# Flags that belong together, by the part behind their dashes; the first that matches counts.
_FAMILIES = (
    (
        r"retro-.*|retriever-seq-length",
        "it is of Retro",
    ),
    (
        r"ict-.*|biencoder-.*|query-in-block-prob|use-one-sent-docs|(evidence|titles|block)-data-path"
        r"|embedding-path|indexer-.*|retriever-.*",
        "it is of the bi-encoders of pretrain_ict.py",
    ),
    (
        r"bert-.*|output-bert-embeddings",
        "it is of BERT",
    ),
    (
        r"decoder-seq-length|vocab-extra-ids|relative-attention-.*",
        "it is of T5",
    ),
    (
        r"vision-pretraining.*|vision-backbone-type|swin-.*|dino-.*|num-classes|mask-type|mask-factor"
        r"|classes-fraction|data-per-class-fraction|iter-per-epoch",
        "it is of a vision model",
    ),
    (
        r"img-[hw]|num-channels|patch-dim|.*vision.*|.*sound.*|.*video.*|radio-.*|freeze-(LM|ViT)"
        r"|language-model-type|.*-til(es?|ing)(-.*)?|use-thumbnail|thumbnail-.*|image-.*|num-frames"
        r"|conv-merging|pixel-shuffle|class-token-len|.*dynamic-resolution.*|dataloader-seq-length"
        r"|decoder-tp-comm-overlap",
        "it is of a vision language model, and its language model alone is not what would train",
    ),
    (
        r"(un)?freeze-.*",
        "what it freezes has no optimizer, and which parameters these are is not known here",
    ),
    (
        r"export-(kd-.*|num-(medusa-heads|eagle-layers))",
        "ModelOpt adds modules for it, and the model is built without ModelOpt here",
    ),
)


def why_another_model(flag: str) -> str | None:
    """Why what is built here is not the model of a flag; None where the flag is of no such model.

    Args:
        flag: with its dashes, and with its value or without.
    """
    name = re.split("[ =]", flag, maxsplit=1)[0].removeprefix("--")
    for pattern, reason in _FAMILIES:
        if re.fullmatch(pattern, name):
            built = "GPT and hybrid (Mamba) models are built here"
            return f"--{name} is not supported: {reason}; {built}"
    return None
