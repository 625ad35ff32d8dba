"""A patched ``pretrain_gpt.py``, run without the launcher, on CPU: needs a Megatron-LM checkout.

MEGATRON_LM_PATH=... pytest tests/megatron_lm/pretrain/test_patch_pretrain.py, with
tests/requirements-pretrain.txt installed. A copy of the checkout is patched.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_pretrain_cpu import of_a_gpu

from megatron_muon.lab.doctor.rows import is_patched
from support import PYTHON311, ROOT
from support.megatron_lm.scripts import (
    CHECKOUT,
    MOCK,
    MODEL,
    MUON,
    RUN,
    argument,
    done,
    losses,
    needs_checkout,
    words,
)

pytestmark = [needs_checkout, pytest.mark.timeout(900)]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
RUN_BF16 = words(MODEL, MOCK, RUN, "--bf16")
# what Megatron has handed to torch.compile before its arguments are parsed must run uncompiled
COMPILING = {"TORCHDYNAMO_DISABLE": "0"}
# as where the plugin is not installed, whatever this environment has
NO_PLUGIN = """
import sys
class NoPlugin:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "megatron_muon":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoPlugin)
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("patched") / "Megatron-LM"
    left_out = shutil.ignore_patterns(".git", "tests", "docs", "images", "examples")
    shutil.copytree(CHECKOUT, root, ignore=left_out)
    patch = str(ROOT / "patches" / "megatron-training.patch")
    subprocess.run(["git", "apply", patch], cwd=root, check=True)
    assert is_patched(root)
    return root


def path(*folders: Path) -> dict[str, str]:
    """PYTHONPATH with these first, then what every run has but the plugin."""
    return {"PYTHONPATH": os.pathsep.join(map(str, [*folders, PYTHON311]))}


def numbers(text: str) -> list[str]:
    return re.findall(r"(?:lm loss|grad norm|lm loss value): (\S+)", text)


@no_gpu
def test_a_patched_checkout_trains_as_through_the_launcher(patched: Path) -> None:
    options = [*RUN_BF16, *words(MUON, "--tensor-model-parallel-size 2")]
    start = [*TORCHRUN, "--nproc-per-node=2"]
    text = done([*start, str(patched / "pretrain_gpt.py"), *options], **COMPILING)
    by_step = losses(text)
    assert len(by_step) >= 6 and by_step[5] < by_step[2] < by_step[0]
    assert "[megatron_muon] pipeline stage 0" in text and argument(text, "optimizer") == "muon"
    assert text.count("[megatron_muon] no GPU is here") == 1
    launched = done([*start, "-m", "megatron_muon", str(CHECKOUT / "pretrain_gpt.py"), *options])
    assert numbers(text) == numbers(launched)


@no_gpu
def test_a_gpus_command_line_trains_in_a_patched_checkout(patched: Path) -> None:
    script = str(patched / "pretrain_gpt.py")
    options = of_a_gpu("--bf16 --distributed-backend nccl --muon-cpu", MUON)
    text = done([*TORCHRUN, "--nproc-per-node=1", script, *options], **COMPILING)
    assert losses(text)[5] < losses(text)[0]
    assert text.count("[megatron_muon] on the CPU: --distributed-backend gloo in place of") == 1
    assert text.count("is active: Distributed Muon over the DistributedOptimizer") == 1


@no_gpu
@pytest.mark.parametrize("plugin", [True, False], ids=["plugin", "no plugin"])
def test_adam_without_a_gpu_is_megatrons_own_error(patched: Path, plugin: bool) -> None:
    code = "" if plugin else NO_PLUGIN
    code += (
        "import runpy, sys; script = sys.argv[1]; sys.argv = sys.argv[1:]; "
        f"sys.path.insert(0, {str(patched)!r}); runpy.run_path(script, run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(patched / "pretrain_gpt.py"), *RUN_BF16]
    text = done([*command, "--optimizer", "adam"], fails=True)
    assert "[megatron_muon]" not in text
    # 0.18 and later ask for the GPU's properties first
    assert "Megatron requires CUDA." in text or "CUDA" in text.strip().splitlines()[-1]


def test_importing_it_turns_nothing_on(patched: Path) -> None:
    """As tools/checkpoint does, which parse arguments on a machine without a GPU."""
    code = (
        "import sys, torch; before = torch.zeros, torch.Tensor.type, torch.compile\n"
        "from megatron.training.arguments import parse_args\n"
        "args = parse_args()\n"
        "from megatron.core import optimizer\n"
        "assert before == (torch.zeros, torch.Tensor.type, torch.compile)\n"
        "assert optimizer.get_megatron_optimizer.__module__ == 'megatron.core.optimizer'\n"
        "print('parsed', args.optimizer, 'megatron_muon.autoload' in sys.modules)\n"
    )
    command = [sys.executable, "-c"]
    assert "parsed adam True" in done([*command, code], **path(patched, ROOT))
    assert "parsed adam False" in done([*command, NO_PLUGIN + code], **path(patched))


def parsed(optimizer: str, code: str, *folders: Path) -> str:
    """What is printed where arguments are parsed; Muon's are refused as they are validated."""
    if optimizer == "muon":  # to adam without a GPU it may have something of its own to say
        code += "validate_args(args)\n"
    command = [sys.executable, "-c", code, *RUN_BF16, *words("--use-distributed-optimizer")]
    command += ["--optimizer", optimizer]
    return done(command, fails=optimizer == "muon", **path(*folders, ROOT))


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_a_mixed_installation_is_refused_for_muon_alone(
    patched: Path, tmp_path: Path, optimizer: str
) -> None:
    core = tmp_path / "megatron" / "core"
    shutil.copytree(patched / "megatron" / "core", core)
    code = (
        "import megatron.core, megatron.training\n"
        "from megatron.training.arguments import parse_args, validate_args\n"
        "args = parse_args()\n"
        "print('parsed', megatron.core.__file__)\n"
    )
    text = parsed(optimizer, code, tmp_path, patched)
    assert f"parsed {core}" in text
    if optimizer == "muon":
        assert "MixedInstallationError: megatron.training is in" in text
        assert str(patched) in text and f"imported from {core}" in text


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_a_megatron_of_another_shape_stops_muon_alone(patched: Path, optimizer: str) -> None:
    code = (
        "import dataclasses, megatron_muon.mcore.seams.training as rows\n"
        "row = rows.ROWS[0]\n"
        "rows.ROWS = (*rows.ROWS, dataclasses.replace(row, name='gone'))\n"
        "from megatron.training.arguments import parse_args, validate_args\n"
        "args = parse_args()\n"
        "print('parsed', args.optimizer)\n"
    )
    text = parsed(optimizer, code, patched)
    assert f"parsed {optimizer}" in text
    assert "[megatron_muon] no --optimizer muon here: " in text
    assert ("SeamError: " in text) == (optimizer == "muon")


@pytest.fixture(scope="module")
def too_new(patched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched checkout, under the number of a version that is not supported."""
    root = Path(shutil.copytree(patched, tmp_path_factory.mktemp("too_new") / "Megatron-LM"))
    file = root / "megatron" / "core" / "package_info.py"
    file.write_text(re.sub(r"^MINOR = \d+$", "MINOR = 21", file.read_text(), flags=re.MULTILINE))
    return root


@pytest.mark.parametrize("start", [["-m", "megatron_muon"], []], ids=["launcher", "patch"])
def test_no_muon_trains_on_an_unsupported_version(too_new: Path, start: list[str]) -> None:
    """Nor Megatron's own, which --optimizer muon means without the plugin from 0.18 on."""
    script = str(too_new / "pretrain_gpt.py")
    text = done([*TORCHRUN, "--nproc-per-node=2", *start, script, *RUN_BF16, *words(MUON)], True)
    assert re.search(r"SeamError: megatron-core 0\.21\.\S+ is not supported", text)
    assert losses(text) == [] and "optimizer muon is not supported" not in text


def test_adamw_starts_on_an_unsupported_version_with_the_patch(too_new: Path) -> None:
    code = (
        "import sys; from megatron.training import arguments\n"
        "args = arguments.parse_args()\n"
        "print('parsed', args.optimizer, hasattr(args, 'muon_backend'))\n"
    )
    command = [sys.executable, "-c", code, *RUN_BF16, "--optimizer", "adam"]
    text = done(command, **path(too_new, ROOT))
    assert "[megatron_muon] no --optimizer muon here: megatron-core 0.21." in text
    assert "parsed adam False" in text
