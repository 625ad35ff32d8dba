"""``splits``: each block of rows is orthogonalized as if it were a parameter of its
own.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from support.expected.separate import trained_apart
from support.models.gpt import (
    Case,
    Topology,
    check,
    error_of_building,
    on_ranks,
    start,
    truth,
)
from support.runs.topologies import DP4, ONE, TP2, TP2_PP2

PLAIN = Case(heads=12, groups=6, ffn=264, vocab=144)
GATED = replace(PLAIN, gated=True)
LATENT = Case(steps=4, mla="duplicated", ffn=264, vocab=144)
COLUMN = replace(LATENT, mla="column")
MIXER = Case(steps=4, mixer="mamba", groups=6, vocab=144)
DELTA = Case(steps=4, mixer="delta", groups=6, ffn=264, vocab=144)
EXPERTS = Case(steps=4, moe=True, gated=True)


def _split(case: Case, *splits: str) -> Case:
    """The case with splits as a command line has them, ``PATTERN=KIND``."""
    return case.with_muon(splits=tuple(tuple(each.split("=")) for each in splits))


# Each has a weight's kind in (pattern, kind) form, to look at its results.
CASES = {
    "qkv": _split(PLAIN, "*.linear_qkv.*=qkv"),
    "qkv-heads": _split(PLAIN, "*.linear_qkv.*=heads"),
    "qkv-whole": _split(PLAIN, "*.linear_qkv.*=whole"),
    "gated-attention-heads": _split(
        replace(PLAIN, output_gate=True), "*.linear_qkv.*=heads"
    ),
    "multi-head": _split(replace(PLAIN, groups=12), "*.linear_qkv.*=heads"),
    "one-group": _split(replace(PLAIN, groups=1), "*.linear_qkv.*=heads"),
    "gate-up": _split(GATED, "*.linear_fc1.*=gate-up"),
    "gate-up-whole": _split(GATED, "*.linear_fc1.*=whole"),
    "latent-heads": _split(
        LATENT, "*_up_proj.*=heads", "*.linear_kv_down_proj.*=parts"
    ),
    "latent-keys": _split(LATENT, "*.linear_kv_up_proj.*=qkv"),
    "latent-column": _split(
        COLUMN, "*_up_proj.*=heads", "*.linear_kv_down_proj.*=parts"
    ),
    "mamba": _split(MIXER, "*.in_proj.*=parts"),
    "mamba-whole": _split(MIXER, "*.in_proj.*=whole"),
    "delta": _split(DELTA, "*.in_proj.*=parts"),
    "rows": _split(
        GATED, "*.linear_fc1.*=rows:120,300,108", "*.linear_proj.*=rows:12,84"
    ),
    "rows-mamba": _split(MIXER, "*.in_proj.*=rows:100,380,12"),
    "groups": _split(PLAIN, "*.linear_qkv.*=groups:6:16,8,8", "*.linear_fc2.*=heads:6"),
    "cols": _split(
        replace(PLAIN, mtp=True, layers=1),
        "*.eh_proj.*=cols:96,96",
        "*.linear_proj.*=cols:16,16,16,16,16,16",
    ),
    "rows-experts": _split(EXPERTS, "*.experts.*.linear_fc1.*=rows:20,28,88"),
    "experts": _split(EXPERTS, "*.linear_fc1.*=gate-up"),
    "legacy-experts": _split(
        replace(EXPERTS, grouped="legacy"), "*.experts.weight1=gate-up"
    ),
    "grouped-experts": _split(replace(EXPERTS, grouped="te"), "*.linear_fc1.*=gate-up"),
}
# Of these sizes, three TP ranks cannot hold experts, nor the 112 rows of one query
# group.
TP_3 = [name for name in CASES if "experts" not in name and name != "one-group"]
RUNS = [
    *((name, Topology(2, 1, 2, ep=2 if CASES[name].moe else 1)) for name in CASES),
    *((name, t) for name in ("qkv-heads", "gate-up") for t in (DP4, TP2_PP2)),
    *((name, Topology(tp=3)) for name in TP_3),
]


@pytest.mark.parametrize("name", CASES)
def test_blocks_move_as_separate_parameters_would(name: str) -> None:
    case = CASES[name]
    whole = truth(case)
    seen = set()
    for pattern, kind in dict(case.muon)["splits"]:
        for weight in [each for each in whole["main"] if fnmatchcase(each, pattern)]:
            if whole["main"][weight].dim() == 1:
                continue
            apart = trained_apart(
                case, weight, tuple(whole["main"][weight].shape), kind
            )
            for what, expected in apart.items():
                assert whole[what][weight].equal(expected), (weight, what)
            seen.add(weight)
    assert len(seen) >= case.layers


@pytest.mark.parametrize("name, topology", RUNS)
def test_any_topology_equals_one_process(name: str, topology: Topology) -> None:
    check(CASES[name], topology)


# --- settings and errors --------------------------------------------------------------


def _errors(topology: Topology, split: tuple[str, str]) -> list[str]:
    splits = {"splits": (split,)}
    return on_ranks(error_of_building, PLAIN, topology, splits)


def _chosen(case: Case, topology: Topology) -> list[tuple[str, int, int]]:
    matrices = start(case, topology).part.muon.plan.matrices
    return [(m.name, m.rows, m.cols) for m in matrices if "qkv" in m.name]


def test_the_last_pattern_that_matches_counts() -> None:
    one_layer = replace(PLAIN, layers=1)
    heads = "*linear_qkv*=heads"
    last = _split(one_layer, heads, "*.0.self_attention.*=whole")
    assert on_ranks(_chosen, last, ONE) == [
        [("decoder.layers.0.self_attention.linear_qkv.weight", 192, 96)]
    ]
    (matrices,) = on_ranks(_chosen, _split(one_layer, heads), ONE)
    parts = [name.partition("[")[2].rstrip("]") for name, _, _ in matrices]
    assert parts == [
        part
        for g in range(6)
        for part in (f"q {2 * g}", f"q {2 * g + 1}", f"k {g}", f"v {g}")
    ]


def test_a_split_that_a_weight_cannot_have_is_an_error() -> None:
    (text,) = _errors(ONE, ("*.linear_fc1.*", "gate-up"))
    assert (
        "splits (--muon-split) *.linear_fc1.*=gate-up matches decoder.layers.0.mlp"
        in text
    )
    assert "which can only be whole: give another kind" in text
    (text,) = _errors(ONE, ("*", "heads"))
    assert "linear_proj.weight, which can only be whole" in text


@pytest.mark.parametrize(
    "split, message",
    [
        (
            ("*.linear_fc1.*", "rows:4,9"),
            "linear_fc1.weight has 264 rows over all TP ranks, not 13",
        ),
        (("*.linear_fc1.*", "heads:7"), "rows over all TP ranks, not a multiple of 7"),
        (("*.linear_fc2.*", "cols:200,64"), "ranges of columns must be equal"),
        (
            ("*.linear_fc2.*", "cols:88,88,88"),
            "2 TP ranks cannot hold whole ranges of cols:88",
        ),
        (
            ("*.linear_fc1.*", "rows:131,133"),
            "2 TP ranks cannot hold equal parts of the 131 rows",
        ),
    ],
)
def test_rows_of_ones_own_that_do_not_fit_are_errors(
    split: tuple[str, str], message: str
) -> None:
    assert all(message in text for text in _errors(TP2, split))


@pytest.mark.parametrize("pattern", ["*.linear_none.*", "*word_embeddings*"])
def test_a_pattern_without_effect_is_an_error(pattern: str) -> None:
    (text,) = _errors(ONE, (pattern, "whole"))
    assert (
        f"{pattern!r} in splits (--muon-split) matches no parameter of the model, or none that it could change"
        in text
    )
