"""What an earlier version had ends in a sentence that says what to do now."""

from __future__ import annotations

import argparse

import pytest

import megatron_muon
from megatron_muon import MuonConfig
from megatron_muon.megatron_lm.flags.parser import add_flags
from megatron_muon.settings import left
from megatron_muon.settings.config import ROWS
from megatron_muon.settings.run_flags import FLAGS

SENTENCE = "give --optimizer muon"


@pytest.mark.parametrize("words", [[], ["3"]])
def test_a_flag_that_left_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    monkeypatch.setitem(left.FLAGS, "--muon-of-yore", SENTENCE)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert not any("yore" in name for name in vars(parser.parse_args([])))
    assert "--muon-of-yore" not in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["--muon-of-yore", *words])
    said = capsys.readouterr().err
    assert said.endswith(f"error: --muon-of-yore was removed: {SENTENCE}\n")


def test_a_setting_and_a_name_that_left_end_in_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(left.FIELDS, "of_yore", SENTENCE)
    monkeypatch.setitem(left.NAMES, "of_yore", SENTENCE)
    with pytest.raises(TypeError, match=f"of_yore was removed: {SENTENCE}"):
        MuonConfig(of_yore=1)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match=f"of_yore was removed: {SENTENCE}"):
        megatron_muon.of_yore  # type: ignore[attr-defined]  # noqa: B018


def test_nothing_that_is_there_is_said_to_have_left() -> None:
    assert left.FLAGS.keys().isdisjoint(flag.option for flag in FLAGS)
    assert left.FIELDS.keys().isdisjoint(ROWS)
    assert left.NAMES.keys().isdisjoint(megatron_muon.__all__)


@pytest.mark.parametrize(
    "sentence", [*left.FLAGS.values(), *left.FIELDS.values(), *left.NAMES.values()]
)
def test_each_sentence_goes_on_from_the_colon(sentence: str) -> None:
    assert not sentence[0].isupper() and not sentence.endswith(".")
