"""Settings of a run: which matrices there are, who computes them and when, what is
written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_muon.settings import kinds
from megatron_muon.settings.rows import UPSTREAM, row

HomePolicy = Literal["balanced", "local"]
SplitMatrices = int | Literal["auto", "off"]

_MOST_STRIPS = 64  # beyond, squares are all of the work
NODE = 8  # GPUs, and the most strips of a matrix that are chosen by themselves


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Routing, splits, homes, exchange, checkpoints and logs; ``MuonConfig`` has all
    settings.
    """

    split_qkv: bool = row(
        True,
        "--muon-no-split-qkv",
        "Orthogonalize a fused QKV weight as one matrix.",
        kinds.FALSE_SWITCH,
        name="muon_split_qkv",
        source=UPSTREAM,
        without="The default is Q, K and V separately.",
    )
    splits: tuple[tuple[str, str], ...] = row(
        (),
        "--muon-split",
        "Matrices of the weights whose names match a pattern. whole: one. qkv: of "
        "fused attention, and of MLA's linear_kv_up_proj. heads: of the same, and of "
        "q. gate-up: of a gated linear_fc1. parts: of MLA's down-projections, and of "
        "the in_proj of a Mamba mixer or a gated delta net. rows:A,B, cols:A,A, "
        "heads:N and groups:N:A,B split any weight by numbers of the whole one. May be "
        "given several times; the last pattern that matches counts. See "
        "docs/routing.md.",
        kinds.pairs("kind", kinds.Kind(kinds.check_split)),
        without="The default is qkv for fused attention, whole for others.",
    )
    muon_include: tuple[str, ...] = row(
        (),
        "--muon-include",
        "Give the parameters whose names match a pattern (*, ?, []) to Muon, whatever "
        "the routing says. megatron-muon routes prints the names. May be given several "
        "times.",
        kinds.PATTERNS,
        without="The default is none.",
    )
    muon_exclude: tuple[str, ...] = row(
        (),
        "--muon-exclude",
        "Give the parameters whose names match a pattern to AdamW, whatever the "
        "routing says. Patterns are those of --muon-include. May be given several "
        "times.",
        kinds.PATTERNS,
        without="The default is none.",
    )
    homes: HomePolicy = row(
        "balanced",
        "--muon-homes",
        "Choice of the rank that orthogonalizes a matrix. balanced evens out the "
        "ranks' work. local sends the fewest bytes, and some ranks work longer: for "
        "slow links (docs/performance.md).",
        kinds.choice(get_args(HomePolicy)),
    )
    split_matrices: SplitMatrices | None = row(
        None,
        "--muon-split-matrices",
        "Number of ranks that orthogonalize a long or a large matrix together, each a "
        "strip of it. auto: up to 8, where that shortens the busiest rank's time. It "
        "helps stages whose largest matrix has more work than a rank's share. Bits "
        "depend on the number of strips.",
        kinds.count_or_words(("auto", "off"), "auto|off|RANKS", 2, _MOST_STRIPS),
        without="The default is auto on a GPU. It is off on a CPU, with "
        "--deterministic-mode and with --muon-log-interval.",
    )
    node_ranks: int = row(
        8,
        "--muon-node-ranks",
        "Ranks of a node, or of another group with fast links. Ranks that share a "
        "matrix are of one node where that is faster. A run never measures it.",
        kinds.count("RANKS"),
    )
    round_bytes: int | None = row(
        None,
        "--muon-round-mib",
        "Cap on a rank's buffers for one round of the exchange, in MiB. A single "
        "larger parameter may pass it. Lower it to save memory; a step holds two "
        "rounds.",
        kinds.count_or_zero("MIB", unit=1 << 20),
        without=(
            "The default is 0: three times the largest parameter's buffers, at "
            "least 256."
        ),
    )
    checkpoint_digest: bool = row(
        True,
        "--no-muon-checkpoint-digest",
        "Neither write nor check the digest of a checkpoint: size and checksum of its "
        "files, and Muon's matrices.",
        kinds.OFF_SWITCH,
        without="By default it is written and checked.",
        with_adamw="adamw_from_muon",
    )
    nonfinite_limit: int = row(
        3,
        "--muon-nonfinite-limit",
        "End the run once so many lines of the log in a row (--log-interval) name a "
        "matrix whose direction was not finite. A step leaves such a matrix where it "
        "was, without decay.",
        kinds.count("LINES"),
    )
    log_interval: int | None = row(
        None,
        "--muon-log-interval",
        "Steps from one logging step to the next. A logging step writes each matrix's "
        "update, weight, momentum and direction in a few numbers to TensorBoard and "
        "W&B, their ranges and warnings to the run's log. The training stays as it is, "
        "but a GPU shares no matrices (--muon-split-matrices off).",
        kinds.count("STEPS").or_none(),
        without="The default is never.",
    )
