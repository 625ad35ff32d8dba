"""A setting is one row: what holds of every row, and that one more row is one more
setting.
"""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import asdict, dataclass, fields
from typing import Any

import pytest

from megatron_muon import MuonConfig
from megatron_muon.megatron_lm.flags import namespace, parser
from megatron_muon.settings import flags
from megatron_muon.settings.config import ROWS
from megatron_muon.settings.kinds import count
from megatron_muon.settings.rows import row, rows_of
from megatron_muon.settings.run_flags import FLAGS, RUN_ROWS
from support.megatron_lm.flag_parsers import EVERY, parsed, parser_of
from support.settings import BAD, OTHERS, WITH

EVERY_ROW = pytest.mark.parametrize("field", ROWS)


def test_every_field_is_a_row_and_no_flag_is_in_two() -> None:
    assert list(ROWS) == [field.name for field in fields(MuonConfig)]
    assert {field: row.default for field, row in ROWS.items()} == asdict(MuonConfig())
    assert ROWS.keys() == OTHERS.keys() == BAD.keys()
    assert (
        len({flag.option for flag in FLAGS})
        == len({flag.dest for flag in FLAGS})
        == len(FLAGS)
    )


@pytest.mark.parametrize("at", [*ROWS.values(), *RUN_ROWS], ids=lambda row: row.named)
def test_a_row_has_its_flag_its_help_and_a_default_that_it_accepts(at: Any) -> None:
    at.require(at.default)
    assert at.flags[0].option in at.named
    for flag in at.flags:
        assert (
            flag.option.startswith("--")
            and "default" in flag.help
            and "%" not in flag.help
        )
        if flag.kind.choices:  # argparse's own check says no less than the row's
            for choice in flag.kind.choices:
                meaning = flag.kind.read(choice)
                at.require(at.default if meaning is None else meaning)


@EVERY_ROW
def test_a_value_that_cannot_be_is_refused_with_field_and_flag(field: str) -> None:
    wrong = [(value, "") for value in (None, b"", 1j, [1], {"a": 1})]
    for value, said in (*BAD[field], *wrong):
        if value is ROWS[field].default:
            continue
        with pytest.raises((TypeError, ValueError), match=said) as refused:
            MuonConfig(**{field: value})
        assert str(refused.value).startswith(ROWS[field].named), value
        if not isinstance(value, (str, tuple, dict, list)) and said:
            assert str(value) in str(refused.value)


@EVERY
@EVERY_ROW
def test_a_row_is_the_flags_default_and_what_its_flags_write(
    version: str, field: str
) -> None:
    default, other = ROWS[field].default, OTHERS[field]
    assert getattr(flags.muon_config(parsed(version)), field) == default
    config = MuonConfig(**{field: other, **WITH.get(field, {})})
    values = namespace.all_written(parsed(version), config)
    for flag in ROWS[field].flags:
        assert flag.kind.read(values[flag.dest]) == other, flag.option
    args = Namespace(**{**vars(parsed(version)), **values})
    if field != "ns_dtype":  # in fp32 a flag of Megatron's says torch's own switch
        assert flags.muon_config(args) == config


def test_one_more_row_is_one_more_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flag, its help, its check, its name in errors, its value in Megatron's
    arguments.
    """

    @dataclass(frozen=True, kw_only=True)
    class More(MuonConfig):
        warmth: int = row(3, "--muon-warmth", "Warmth.", count(most=9))

    added = rows_of(More)["warmth"]
    monkeypatch.setitem(ROWS, "warmth", added)
    monkeypatch.setattr(flags, "MuonConfig", More)
    for module in (namespace, parser, flags):
        monkeypatch.setattr(module, "FLAGS", (*FLAGS, *added.flags), raising=False)
    assert added.flags[0].help == "Warmth. A flag of megatron_muon. The default is 3."
    args = parsed("0.16", "--muon-warmth 7")
    config: Any = flags.muon_config(args)
    assert config == More(warmth=7) and flags.muon_config(parsed("0.16")) == More()
    namespace.write_all(args, config)
    assert args.muon_warmth == 7
    with pytest.raises(
        ValueError, match=re.escape("warmth (--muon-warmth) must be at most 9")
    ):
        flags.muon_config(parsed("0.16", "--muon-warmth 10"))
    args = parsed("0.16", "--optimizer adam --muon-warmth 7")
    with pytest.raises(
        ValueError, match=r"--muon-warmth is for .*this run has --optimizer adam"
    ):
        namespace.remove_flags(args)
    args = parsed("0.16", "--optimizer adam")
    namespace.remove_flags(args)
    assert vars(args) == vars(parser_of("0.16").parse_args([]))
