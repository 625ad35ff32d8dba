"""Megatron-LM on a machine without a GPU, by the launcher and by a patched checkout;
needs one.
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

from megatron_muon.lab.doctor.rows import is_patched
from support import PYTHON311, ROOT
from support.megatron_lm.scripts import (
    CHECKOUT,
    MOCK,
    MODEL,
    MUON,
    RUN,
    alone,
    argument,
    done,
    falling,
    known_flags,
    losses,
    needs_checkout,
    pretrain,
    words,
)

pytestmark = [needs_checkout, pytest.mark.timeout(900)]
no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="about a machine without a GPU"
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
RUN_BF16 = words(MODEL, MOCK, RUN, "--bf16")
# what Megatron has handed to torch.compile before its arguments are parsed must run
# uncompiled
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
    falling(text)
    assert (
        "is active: Distributed Muon" in text and argument(text, "optimizer") == "muon"
    )
    assert text.count("[megatron_muon] no GPU is here") == 1
    launched = done(
        [*start, "-m", "megatron_muon", str(CHECKOUT / "pretrain_gpt.py"), *options]
    )
    assert numbers(text) == numbers(launched)


@no_gpu
def test_a_gpus_command_line_trains_in_a_patched_checkout(patched: Path) -> None:
    script = str(patched / "pretrain_gpt.py")
    options = of_a_gpu("--bf16 --distributed-backend nccl --muon-cpu", MUON)
    text = done([*TORCHRUN, "--nproc-per-node=1", script, *options], **COMPILING)
    assert losses(text)[5] < losses(text)[0]
    gloo = "[megatron_muon] on the CPU: --distributed-backend gloo in place of"
    assert text.count(gloo) == 1
    assert text.count("is active: Distributed Muon over the DistributedOptimizer") == 1


@no_gpu
@pytest.mark.parametrize("plugin", [True, False], ids=["plugin", "no plugin"])
def test_adam_without_a_gpu_is_megatrons_own_error(patched: Path, plugin: bool) -> None:
    code = "" if plugin else NO_PLUGIN
    code += (
        "import runpy, sys; script = sys.argv[1]; sys.argv = sys.argv[1:]; "
        f"sys.path.insert(0, {str(patched)!r}); runpy.run_path(script, "
        "run_name='__main__')"
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
        "assert optimizer.get_megatron_optimizer.__module__ == "
        "'megatron.core.optimizer'\n"
        "print('parsed', args.optimizer, 'megatron_muon.autoload' in sys.modules)\n"
    )
    for said, own, folders in (
        ("parsed adam True", code, [patched, ROOT]),
        ("parsed adam False", NO_PLUGIN + code, [patched]),
    ):
        assert said in done([sys.executable, "-c", own], **path(*folders))


def parsed(optimizer: str, code: str, *folders: Path) -> str:
    """What is printed where arguments are parsed; Muon's are refused as they are
    validated.
    """
    fails = optimizer != "adam"
    # to adam without a GPU it may have something of its own to say
    code += "validate_args(args)\n" * fails
    flags = words("--use-distributed-optimizer --optimizer", optimizer)
    command = [sys.executable, "-c", code, *RUN_BF16, *flags]
    return done(command, fails, **path(*folders, ROOT))


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


@pytest.mark.parametrize("optimizer", ["muon", "dist_muon", "adam"])
def test_a_megatron_of_another_shape_stops_muon_alone(
    patched: Path, optimizer: str
) -> None:
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
    assert ("SeamError: " in text) == (optimizer != "adam")


@pytest.fixture(scope="module")
def too_new(patched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched checkout, under the number of a version that is not supported."""
    root = tmp_path_factory.mktemp("too_new") / "Megatron-LM"
    shutil.copytree(patched, root)
    file = root / "megatron" / "core" / "package_info.py"
    file.write_text(re.sub(r"\bMINOR = \d+", "MINOR = 21", file.read_text()))
    return root


@pytest.mark.parametrize(
    "start, muon",
    [
        (["-m", "megatron_muon"], MUON),
        ([], MUON),
        ([], MUON.replace("muon", "dist_muon")),
    ],
    ids=["launcher", "patch", "patch, dist_muon"],
)
def test_no_muon_trains_on_an_unsupported_version(
    too_new: Path, start: list[str], muon: str
) -> None:
    """Nor Megatron's own, which --optimizer muon means without the plugin from 0.18
    on.
    """
    script = str(too_new / "pretrain_gpt.py")
    text = done(
        [*TORCHRUN, "--nproc-per-node=2", *start, script, *RUN_BF16, *words(muon)], True
    )
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


CPU_ONLY = (  # of the other tests' command lines, which say themselves what a CPU needs
    "--transformer-impl local --attention-backend unfused --no-rope-fusion "
    "--no-gradient-accumulation-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm --distributed-backend gloo"
)


def of_a_gpu(*options: str) -> list[str]:
    """The words of a plain command line: nothing in it is about a CPU."""
    text = f" {MODEL} {MOCK} {RUN} "
    for flag in re.findall(r"--\S+(?: [^-\s]\S*)?", CPU_ONLY):
        assert f" {flag} " in text, flag
        text = text.replace(f" {flag} ", " ")
    return words(text, *options)


@no_gpu
@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_a_gpus_command_line_trains(optimizer: str) -> None:
    given = f"{MUON} --distributed-backend nccl --tensor-model-parallel-size 2"
    if optimizer == "adam":
        given = "--optimizer adam --use-distributed-optimizer --weight-decay-all-params"
    processes = 2 if optimizer == "muon" else 1
    command = [*TORCHRUN, f"--nproc-per-node={processes}", "-m", "megatron_muon"]
    command.append(str(CHECKOUT / "pretrain_gpt.py"))
    text = done([*command, *of_a_gpu("--bf16 --attention-backend flash", given)])
    by_step = losses(text)
    # each step has new data: AdamW's losses in between rise, as they do without the
    # plugin
    assert len(by_step) >= 6 and by_step[5] < by_step[0]
    for said in (
        "--distributed-backend gloo in place of nccl: NCCL connects GPUs only",
        "--transformer-impl local in place of transformer_engine: ",
        "--attention-backend unfused in place of flash: ",
        "--no-persist-layer-norm: ",
        "--no-gradient-accumulation-fusion: ",
        "--no-masked-softmax-fusion: ",
        "--no-rope-fusion: ",
    ):
        assert text.count(f"[megatron_muon] on the CPU: {said}") == 1, said
    decays = "[megatron_muon] --weight-decay-all-params: AdamW decays norms' gammas"
    assert text.count(decays) == (optimizer == "adam")
    assert text.count("is active: Distributed Muon over") == (optimizer == "muon")


def test_adamws_twin_decays_what_adamw_spares() -> None:
    given = "--bf16 --optimizer adam --use-distributed-optimizer --weight-decay 5"
    spared, decayed = (
        losses(pretrain(1, given, more)) for more in ("", "--weight-decay-all-params")
    )
    assert decayed[0] == spared[0]  # before any step
    assert all(a != b for a, b in zip(decayed[2:6], spared[2:6], strict=True))


def test_what_a_cpu_cannot_run_is_one_error() -> None:
    given = {
        "--fp8-format": "hybrid",
        "--tp-comm-overlap": "",
        "--te-rng-tracker": "",
        "--cross-entropy-fusion-impl": "te",
        "--moe-router-fusion": "",
        "--use-sharp": "",
    }
    known = {flag: value for flag, value in given.items() if flag in known_flags()}
    assert len(known) > 2
    options = " ".join(f"{flag} {value}" for flag, value in known.items())
    text = alone(MODEL, MOCK, RUN, "--bf16", MUON, options, "--muon-cpu", fails=True)
    (error,) = re.findall(r"ValueError: .*\n(?:  --.*\n)+", text)
    assert f"{len(known)} of the given options cannot" in error
    for flag in known:
        assert re.search(rf"^  {flag}\b.* \(.+\): \S", error, re.MULTILINE), flag
    assert "building GPT model" not in text
