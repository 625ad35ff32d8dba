"""Reads a checkpoint's arguments as Megatron's own tools do, without megatron_muon's
flags.

``reads_checkpoint_args.py plain FILE`` unpickles with the plugin out of reach;
``reads_checkpoint_args.py saver FILE`` hands them to the checks of tools/checkpoint's
saver. The checkout is on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path


def plain(file: str) -> None:
    """Print the arguments that are ours or Muon's as JSON."""
    sys.modules["megatron_muon"] = None
    import torch

    saved = vars(torch.load(file, weights_only=False)["args"])
    ours = {
        name: value
        for name, value in saved.items()
        if "muon" in name or name == "optimizer"
    }
    print("SAVED", json.dumps(ours))


def saver(file: str) -> None:
    """What ``convert.py --saver core`` does with them: overwrite its own, then
    validate.
    """
    import torch

    import megatron_muon.cpu as cpu

    cpu.enable()
    import megatron.training

    tools = Path(str(megatron.training.__file__)).parents[2] / "tools" / "checkpoint"
    sys.path.insert(0, str(tools))
    from saver_base import MegatronCheckpointSaverBase

    args = torch.load(file, weights_only=False)["args"]
    tool = Namespace(
        target_tensor_parallel_size=1,
        target_pipeline_parallel_size=1,
        target_expert_parallel_size=1,
        save_dir="nowhere",
        saver_transformer_impl="local",
    )
    converter = MegatronCheckpointSaverBase(tool, None)
    converter.md = Namespace(checkpoint_args=args)
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    line = [
        word
        for name in sizes
        for word in (f"--{name.replace('_', '-')}", getattr(args, name))
    ]
    line += [
        "--max-position-embeddings",
        32,
        "--micro-batch-size",
        1,
        "--bf16",
        "--save",
        "nowhere",
    ]
    line += [
        "--save-interval",
        1,
        "--tokenizer-type",
        "NullTokenizer",
        "--no-save-optim",
    ]
    converter.build_sys_argv = lambda: ["script.py", *map(str, line)]
    converter.parse_megatron_args()
    print("VALIDATED", converter.margs.optimizer)


{"plain": plain, "saver": saver}[sys.argv[1]](sys.argv[2])
