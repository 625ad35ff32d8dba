"""``uninstall()`` leaves no trace: modules and classes hold the very objects that they
held before.

With the scripts of Megatron-LM too where MEGATRON_LM_PATH names a checkout.
"""

from __future__ import annotations

from support.installed import VERSION
from support.megatron_lm.scripts import CHECKOUT, needs_checkout
from support.processes import python

# Run in a process of its own, whose modules no other test has changed. Everything that
# install() would import is imported before, since an import is no change that can be
# undone.
_CODE = """
import importlib, sys
import torch, torch.distributed.checkpoint
import megatron_muon

megatron_muon.cpu.enable(allow_cuda=True)
if {training}:
    import megatron_muon.cpu.training as cpu_training
    cpu_training.enable()
    import megatron.training.arguments
from megatron_muon.mcore.seams import rows, training as script_rows
import megatron_muon.mcore.wiring.install
rows.check_hooks()
if {training}:
    from megatron_muon.megatron_lm import install as scripts
    rows.check_rows(script_rows.ROWS)

def held():
    found = {{}}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("megatron", "torch") or module is None:
            continue
        space = vars(module)
        found |= {{(name, key): value for key, value in space.items()}}
        for class_name, owner in list(space.items()):
            if isinstance(owner, type) and owner.__module__ == name:
                found |= {{(name, class_name, key): value for key, value in vars(owner).items()}}
    return found

VOLATILE = ("__annotations_cache__", "_abc_impl", "__abstractmethods__")
def differing(one, two):
    keys = [key for key in one.keys() | two.keys() if key[-1] not in VOLATILE]
    gone = object()
    return sorted(str(k) for k in keys if one.get(k, gone) is not two.get(k, gone))

before = held()
config = megatron_muon.MuonConfig()
kept = []
for _ in range(2):
    if {training}:
        scripts.install_training()
    megatron_muon.install(config)
    once = held()
    megatron_muon.install()
    print("AGAIN", differing(once, held()))
    during = differing(before, held())
    kept.append(importlib.import_module("megatron.core.optimizer").get_megatron_optimizer)
    megatron_muon.uninstall()
    print("AFTER", differing(before, held()))
for name in during:
    print("DURING", name)
from types import SimpleNamespace
try:  # what was kept passes the call on: Megatron itself finds that there is no such model
    kept[0](SimpleNamespace(optimizer="muon"), None)
except Exception as error:
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    print("PASSED ON", "megatron/core/optimizer" in frames[-1] or "megatron/core" in frames[2])
"""


def _lines(training: bool, *path: str) -> list[str]:
    done = python("-W", "ignore", "-c", _CODE.format(training=training), path=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_install_and_uninstall_leave_every_object_in_its_place() -> None:
    lines = _lines(False)
    assert [line for line in lines if line.startswith("AGAIN")] == ["AGAIN []"] * 2
    assert [line for line in lines if line.startswith("AFTER")] == ["AFTER []"] * 2
    changed = {line for line in lines if line.startswith("DURING")}
    assert "DURING ('megatron.core.optimizer', 'get_megatron_optimizer')" in changed
    assert "DURING ('megatron.core.dist_checkpointing', 'save')" in changed
    if VERSION >= (0, 18):
        assert any("'DistributedDataParallel', '__init__'" in line for line in changed)
    assert "PASSED ON True" in lines


@needs_checkout
def test_hooks_in_megatron_lms_scripts_leave_every_object_in_its_place() -> None:
    lines = _lines(True, str(CHECKOUT))
    assert [line for line in lines if line.startswith("AFTER")] == ["AFTER []"] * 2
    changed = {line for line in lines if line.startswith("DURING")}
    assert "DURING ('megatron.training.arguments', 'parse_args')" in changed
    assert "DURING ('megatron.training.training', 'save_checkpoint')" in changed
    assert not [line for line in changed if line.startswith("DURING ('torch")]
