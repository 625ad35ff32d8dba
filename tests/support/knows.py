"""How many modules of the plugin know an optional feature: its names in their code.

That number is what the feature costs a reader. Docstrings and comments are left out. A
commit that renames something adds the new name to ``PATTERNS``: a rename is no
reduction.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

PATTERNS = {
    "strips": r"\bstrips?\b|\bStrip\b|is_strip|[Ss]harers?\b|own_strips|split_matrices"
    r"|SplitMatrices|comes_as_rows|node_ranks|plan\.shared|not_shared_lines|node_lines"
    r"|SharedMatrix|\.shared\b|layout_free|may_share",
    "rules but muon": r"[Hh]yperball|[Nn]or[Mm]uon|[Aa]da[Mm]uon|\b[Nn]amo|radii"
    r"|RunRadii|home_state|home_key|HOME_STATE|moment2|ADAPTIVE|adaptive"
    r"|has_moments|asks_before|asks_after|SliceSums|numbers_before"
    r"|numbers_after|SliceState|\badapts\b|drop_absent",
    "by pattern": r"by_pattern|numerics\.where|OF_MATRICES|AT_HOMES|with_settings"
    r"|GROUP_SETTINGS|pairs_of|[^_]lr_mults|wd_mults|muon_include"
    r"|muon_exclude|\bsplits\b",
    "watching": r"log_interval|log_file|\bwatch\b|[Oo]bserver|_watch\b|mcore\.watching",
    "precision-aware": r"adam_holds_main|OfFusedAdam|OfWeights"
    r"|use_precision_aware_optimizer|try_states|of_halves|write_halves|are_copies",
    "on the host": r"optimizer_cpu_offload|adamw_is_last|HybridOfAdamW|OfHybrid"
    r"|HostMemory|visiting\b",
    "QK-Clip": r"qk_clip|QkClip|log_max_attention_logit",
    "block steps": r"full_period|PeriodicMuon|block_steps|block_lr_mult|\.variants"
    r"|block_numerics|in_tp_slices",
    "manifest": r"checkpoint_digest|DigestError|[Mm]anifest|\bseal\b|file_hash",
    "early gathers": r"early_param_gather|early_gathers|EarlyGather|gathers_one_by_one",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def counts(package: Path) -> dict[str, int]:
    """The number of modules without ``lab`` that know each feature; the last is that
    of all.
    """
    paths = sorted(package.rglob("*.py"))
    plugin = [path for path in paths if "lab" not in path.relative_to(package).parts]
    codes = [_code(path.read_text(encoding="utf8")) for path in plugin]
    known = {
        feature: sum(bool(re.search(pattern, code)) for code in codes)
        for feature, pattern in PATTERNS.items()
    }
    return {**known, "modules": len(plugin)}


def _code(source: str) -> str:
    """A file's code without docstrings and comments."""
    skipped = lines_of(docstrings(ast.parse(source)))
    lines: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT and token.start[0] not in skipped:
            lines.setdefault(token.start[0], []).append(token.string)
    return "\n".join(" ".join(line).replace(" . ", ".") for line in lines.values())


def docstrings(tree: ast.AST) -> Iterator[ast.stmt]:
    """The docstrings of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            if ast.get_docstring(node, clean=False) is not None:
                yield node.body[0]


def lines_of(statements: Iterable[ast.stmt]) -> set[int]:
    """The numbers of all lines that the statements cover."""
    covered: set[int] = set()
    for statement in statements:
        last = statement.end_lineno or statement.lineno
        covered.update(range(statement.lineno, last + 1))
    return covered
