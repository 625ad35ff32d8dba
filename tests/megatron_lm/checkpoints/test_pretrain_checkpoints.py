"""Ways to save and load of the real ``pretrain_gpt.py``: needs a checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_muon.mcore.checkpoint import manifest
from support.megatron_lm.scripts import (
    MUON,
    known_flags,
    losses,
    needs_checkout,
    needs_torch_dist,
    pretrain,
    steps,
)
from support.started import lines_at_start

pytestmark = [needs_checkout, pytest.mark.timeout(1500)]
Six = tuple[Path, str]
RUN = f"{MUON} --bf16 --lr-decay-style constant --ckpt-format torch_dist"


@pytest.fixture(scope="module", autouse=True)
def _can_save() -> None:
    needs_torch_dist()


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Six:
    """Six steps, saved at the third and the sixth while training goes on; and what it
    printed.
    """
    folder = tmp_path_factory.mktemp("six")
    return folder, pretrain(1, f"{RUN} --save {folder} --save-interval 3 --async-save")


def complete(folder: Path) -> list[int]:
    return [
        int(x.name[5:])
        for x in sorted(folder.glob("iter_*"))
        if manifest.says_complete(x)
    ]


def test_an_asynchronous_save_is_sealed_and_resumes(six: Six, tmp_path: Path) -> None:
    folder, text = six
    assert complete(folder) == [3, 6]
    again = pretrain(1, f"{RUN} --load {folder} --ckpt-step 3 --train-iters 6")
    # Megatron's log has the mean of the first two iterations after a start as its
    # second
    assert {n: steps(again)[n] for n in (4, 6)} == {n: steps(text)[n] for n in (4, 6)}
    loads = set(lines_at_start(again)) - set(lines_at_start(text))
    assert 1 <= len(loads) <= 3 and any("files checked" in line for line in loads)


def test_a_persistent_worker_saves_on_a_cpu(six: Six, tmp_path: Path) -> None:
    """Megatron spawns it, so it has what the runtime replaces only if it is given to
    it.
    """
    if "--use-persistent-ckpt-worker" not in known_flags():
        pytest.skip("this Megatron has no persistent worker")
    worker = "--save-interval 3 --async-save --use-persistent-ckpt-worker"
    if "--async-strategy" in known_flags():
        worker += " --async-strategy mcore"  # the other one is of another package
    text = pretrain(1, f"{RUN} --save {tmp_path} {worker}")
    assert complete(tmp_path) == [3, 6]
    assert steps(text) == steps(six[1])


def test_finetune_loads_only_the_model(six: Six) -> None:
    folder, text = six
    again = pretrain(1, f"{RUN} --load {folder} --finetune --train-iters 2")
    assert list(steps(again)) == [1, 2]
    # of trained weights, at the first of the data
    assert losses(again)[0] < losses(text)[0] - 0.1


def test_no_load_optim_starts_momentum_anew(six: Six) -> None:
    folder, text = six
    again = pretrain(
        1, f"{RUN} --load {folder} --ckpt-step 3 --no-load-optim --train-iters 6"
    )
    assert losses(again)[0] == losses(text)[3]  # the same weights and data
    assert losses(again)[-1] != losses(text)[-1]


def test_a_run_resumes_from_a_non_persistent_checkpoint(
    six: Six, tmp_path: Path
) -> None:
    """The global kind: in a folder of its own."""
    kind = (
        "--non-persistent-ckpt-type global --non-persistent-global-ckpt-dir "
        f"{tmp_path}/fast"
    )
    where = f"--save {tmp_path}/slow --load {tmp_path}/slow --save-interval 100 {kind}"
    run = f"{RUN} {where} --non-persistent-save-interval 2"
    pretrain(1, f"{run} --exit-interval 5")
    assert complete(tmp_path / "fast")[-1] == 4 and complete(tmp_path / "slow") == [5]
    shutil.rmtree(tmp_path / "slow")  # it is the later one, which a run takes
    again = steps(pretrain(1, run))
    assert list(again) == [5, 6] and again[5] == steps(six[1])[5]


@pytest.mark.parametrize("algorithm", ["atomic", "fully_parallel"])
def test_a_run_resumes_from_a_local_checkpoint(algorithm: str, tmp_path: Path) -> None:
    """The local kind: of each rank, in a folder of its node."""
    pytest.importorskip(
        "nvidia_resiliency_ext", reason="Megatron needs it for these, AdamW's too"
    )
    kind = (
        "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir "
        f"{tmp_path}/fast"
    )
    kind += (
        f" --non-persistent-local-ckpt-algo {algorithm} --non-persistent-save-interval "
        "4"
    )
    where = f"--save {tmp_path}/slow --load {tmp_path}/slow --save-interval 100"
    run = f"{RUN} --tensor-model-parallel-size 2 {kind} {where}"
    whole = steps(pretrain(4, run))
    files = sorted(path.name for path in (tmp_path / "fast").rglob("*_local.pt"))
    assert files == [f"iter_0000004_{rank}_local.pt" for rank in range(4)]
    shutil.rmtree(tmp_path / "slow")
    again = steps(pretrain(4, run))
    assert list(again) == [5, 6]
    # the log has the mean of the first two iterations as its second
    assert again[5] == whole[5]


def test_a_pretrained_checkpoint_is_where_a_run_without_one_starts(
    six: Six, tmp_path: Path
) -> None:
    folder, text = six
    where = f"--pretrained-checkpoint {folder} --save {tmp_path} --load {tmp_path}"
    again = pretrain(1, f"{RUN} {where} --save-interval 2 --train-iters 2")
    assert list(steps(again)) == [1, 2]
    assert losses(again)[0] < losses(text)[0] - 0.1
    assert complete(tmp_path) == [2]
    adamws = tmp_path / "adamw"  # whose optimizer state is not loaded
    pretrain(
        1, f"{RUN} --optimizer adam --save {adamws} --save-interval 2 --train-iters 2"
    )
    again = pretrain(1, f"{RUN} --pretrained-checkpoint {adamws} --train-iters 2")
    assert list(steps(again)) == [1, 2]
