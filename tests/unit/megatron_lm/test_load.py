"""A load in Megatron-LM counts as checked for as long as it lasts."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.mcore.checkpoint import seal
from megatron_muon.megatron_lm import checkpointing, rates


def test_a_load_that_fails_leaves_no_folder_that_the_next_one_does_not_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def is_checked(*_: Any) -> bool:
        seal._checked = tmp_path
        return True

    def fails(*_: Any, **__: Any) -> None:
        assert seal._checked == tmp_path
        raise KeyError("a key that is missing")

    flags = Namespace(override_opt_param_scheduler=False, finetune=False, load=tmp_path)
    monkeypatch.setattr(checkpointing, "parsed", lambda: flags)
    monkeypatch.setattr(checkpointing, "is_on", lambda _: True)
    monkeypatch.setattr(checkpointing, "by_rank_0", lambda act: act())
    monkeypatch.setattr(checkpointing, "_is_from_pretrained", lambda *_: False)
    monkeypatch.setattr(checkpointing, "newest", lambda *_: tmp_path)
    monkeypatch.setattr(checkpointing, "_is_checked", is_checked)
    monkeypatch.setattr(checkpointing, "_checkpointing", lambda: None)
    monkeypatch.setattr(checkpointing, "_step", lambda _: None)
    for module, name in (
        (checkpointing.switching, "from_other"),
        (checkpointing.tracker, "naming"),
        (rates, "of_this_run"),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: nullcontext())
    with pytest.raises(KeyError, match="a key that is missing"):
        checkpointing.load_checkpoint(fails, [], None, None)
    assert seal._checked is None
