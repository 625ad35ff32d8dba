"""Size and style of the code and the documents, beside a table of sizes.

``bash tests/run.sh --mass`` prints them. Nothing here depends on where lines are
broken.

==================  ===================================================================
``statements``      statements, without docstrings and imports
``tokens``          tokens, without comments, line structure, and the lines of docstrings
                    and imports
``doc words``       words of docstrings: they have a floor, never a ceiling
``starred``         displays within displays: ``[*(a, b)]``, ``{**{"a": 1}}``
``chained``         conditional expressions with another one as a branch
``packed``          ``a, b = f(), g()``: more than one side has a call or a comprehension
``two for``         comprehensions with two ``for``
``dense``           the most nodes of the syntax tree a line, in functions of 15 lines on
==================  ===================================================================

The last five are packings: what a reader stumbles at. Tokens are those of Python 3.11,
which CI runs; from 3.12 on an f-string is several.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from support import knows

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_muon"
GENERATED = ("flags.md", "coefficients.md")  # not counted
LOADS = (  # what a training process imports
    "import sys, megatron_muon; megatron_muon.install(); import "
    "megatron_muon.megatron_lm.launch\n"
    "print(*(name for name in sys.modules if name.split('.')[0] == 'megatron_muon'))"
)
LONG = 15  # lines of a function whose density is counted

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
DISPLAYS = (ast.Tuple, ast.List, ast.Set)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
IMPORTS = (ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Size:
    """Counts of one source text or of several."""

    statements: int = 0
    tokens: int = 0
    doc_words: int = 0
    starred: int = 0
    chained: int = 0
    packed: int = 0
    two_for: int = 0
    dense: int = 0

    def __add__(self, other: Size) -> Size:
        """All counts are summed, except for ``dense``: it is the largest."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in COLUMNS}
        sums["dense"] = max(self.dense, other.dense)
        return Size(**sums)


COLUMNS = tuple(field.name for field in fields(Size))
PACKINGS = ("starred", "chained", "packed", "two_for", "dense")

# --- the table of sizes ----------------------------------------------------------------

# Sizes that the code had when an issue was closed. The table changes then, downward. A
# packing that is not named has the size 0; None: it is only printed.
SIZES: dict[str, dict[str, int | None]] = {
    "plugin without lab": {
        "statements": 10_484,
        "tokens": 125_205,
        "two_for": 11,
        "dense": 8,
    },
    "lab": {"statements": 5_021, "tokens": 62_727, "two_for": 3, "dense": 8},
    "tests": {
        "statements": 20_018,
        "tokens": 289_433,
        "two_for": None,
        "dense": None,
    },
}
# What a size may grow by before the check fails: what mends need until an issue closes.
SLACK = 0.03
WORDS_A_TOKEN = 0.25  # of docstrings in the plugin without lab, at least
DOCUMENT_WORDS = 21_000
PAGES = 18
TRAINING_MODULES = 105


def size_in_table(whole: str, column: str) -> int | None:
    """The size of a column; None where the table has none."""
    default = 0 if column in PACKINGS else None
    return SIZES[whole].get(column, default)


# --- counting ------------------------------------------------------------------------


def size_of(source: str) -> Size:
    """The counts of a source text."""
    tree = ast.parse(source)
    docs = list(knows.docstrings(tree))
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, IMPORTS)]
    apart = [*docs, *imports]
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    return Size(
        statements=statements - len(apart),
        tokens=_tokens(source, knows.lines_of(apart)),
        doc_words=sum(len(ast.literal_eval(each.value).split()) for each in docs),
        starred=sum(_starred(node) for node in nodes),
        chained=sum(_is_chained(node) for node in nodes),
        packed=sum(_is_packed(node) for node in nodes),
        two_for=sum(_has_two_for(node) for node in nodes),
        dense=max((_density(node) for node in nodes), default=0),
    )


def _tokens(source: str, passed: set[int]) -> int:
    """Tokens that are no layout and start in none of the lines ``passed``."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type not in LAYOUT and token.start[0] not in passed for token in tokens
    )


def _starred(node: ast.AST) -> int:
    """How many displays are unpacked within this one."""
    if isinstance(node, ast.Dict):
        entries = zip(node.keys, node.values, strict=True)
        return sum(
            key is None and isinstance(value, ast.Dict) for key, value in entries
        )
    if isinstance(node, DISPLAYS):
        starred = (each.value for each in node.elts if isinstance(each, ast.Starred))
        return sum(isinstance(value, DISPLAYS) for value in starred)
    return 0


def _is_chained(node: ast.AST) -> bool:
    if not isinstance(node, ast.IfExp):
        return False
    return isinstance(node.body, ast.IfExp) or isinstance(node.orelse, ast.IfExp)


def _is_packed(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    computed = sum(_computes(value) for value in node.value.elts)
    return isinstance(node.targets[0], ast.Tuple) and computed > 1


def _computes(value: ast.expr) -> bool:
    """Whether a value has a call or a comprehension anywhere in it."""
    return any(
        isinstance(node, (ast.Call, *COMPREHENSIONS)) for node in ast.walk(value)
    )


def _has_two_for(node: ast.AST) -> bool:
    return isinstance(node, COMPREHENSIONS) and len(node.generators) > 1


def _density(node: ast.AST) -> int:
    """Nodes a line of a long function; 0 for all else."""
    if not isinstance(node, knows.FUNCTIONS):
        return 0
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines < LONG:
        return 0
    return round(sum(hasattr(inside, "lineno") for inside in ast.walk(node)) / lines)


# --- rooms ---------------------------------------------------------------------------


def rooms(root: Path = ROOT) -> dict[str, Size]:
    """The counts by room; the last ones are those of ``SIZES``."""
    package = root / "megatron_muon"
    found: dict[str, Size] = {}
    plugin = Size()
    lab = Size()
    for path in _python_files(package):
        size = size_of(path.read_text(encoding="utf8"))
        room = _room(path.relative_to(package))
        if room == "lab":
            lab += size
            continue
        found[room] = found.get(room, Size()) + size
        plugin += size
    tests = Size()
    for path in _python_files(root / "tests"):
        tests += size_of(path.read_text(encoding="utf8"))
    totals = {"plugin without lab": plugin, "lab": lab, "tests": tests}
    return {**found, **totals}


def _python_files(folder: Path) -> list[Path]:
    """Files below a folder, without those below hidden ones."""
    every = sorted(folder.rglob("*.py"))
    return [path for path in every if not _is_hidden(path.relative_to(folder))]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts[:-1])


def _room(path: Path) -> str:
    """``mcore/seams``, ``planning``, …; ``facade`` for the package's own modules."""
    folders = path.parts[:-1]
    if not folders:
        return "facade"
    depth = 2 if folders[0] == "mcore" else 1
    return "/".join(folders[:depth])


# --- the report ----------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A count beside the most that it may be, or the least if that is a floor."""

    name: str
    count: int
    bound: int
    is_floor: bool = False

    @property
    def fails(self) -> bool:
        """Whether the count is beyond its bound."""
        if self.is_floor:
            return self.count < self.bound
        return self.count > self.bound

    def __str__(self) -> str:
        side = "at least" if self.is_floor else "at most"
        verdict = " FAILED" if self.fails else ""
        return f"{self.name}: {self.count:,}, {side} {self.bound:,}{verdict}"


def main() -> int:
    """Print the counts beside the table; 1 where one is beyond it by more than the
    slack.
    """
    sizes = rooms()
    loaded = _loaded()
    _print_table(sizes)
    measures = [
        *_code(sizes),
        _doc_words(sizes["plugin without lab"]),
        *_documents(),
        Measure("modules of a training process", len(loaded), TRAINING_MODULES),
    ]
    for measure in measures:
        print(measure)
    print("\nmodules of the plugin that know a feature")
    for feature, modules in knows.counts(PACKAGE).items():
        print(f"{feature:20}{modules:>11}")
    lab = [name for name in loaded if name.startswith("megatron_muon.lab")]
    if lab:
        print(f"a training process imports {', '.join(lab)}")
    return int(any(measure.fails for measure in measures) or bool(lab))


def _print_table(sizes: dict[str, Size]) -> None:
    print(_row("", [column.replace("_", " ") for column in COLUMNS]))
    for room, size in sizes.items():
        print(_row(room, [f"{getattr(size, column):,}" for column in COLUMNS]))
        if room in SIZES:
            table = [size_in_table(room, column) for column in COLUMNS]
            cells = ["-" if each is None else f"{each:,}" for each in table]
            print(_row("  in the table", cells))
    print()


def _row(name: str, cells: Iterable[str]) -> str:
    return f"{name:20}" + "".join(f"{cell:>11}" for cell in cells)


def _code(sizes: dict[str, Size]) -> Iterator[Measure]:
    for whole in SIZES:
        for column in COLUMNS:
            size = size_in_table(whole, column)
            if size is None:
                continue
            slack = 0 if column in PACKINGS else SLACK
            most = int((1 + slack) * size)
            yield Measure(f"{whole}, {column}", getattr(sizes[whole], column), most)


def _doc_words(plugin: Size) -> Measure:
    least = round(WORDS_A_TOKEN * plugin.tokens)
    return Measure(
        "docstring words of the plugin", plugin.doc_words, least, is_floor=True
    )


def _documents() -> Iterator[Measure]:
    pages = [
        path for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED
    ]
    words = sum(len(path.read_text(encoding="utf8").split()) for path in pages)
    yield Measure("words of documents", words, DOCUMENT_WORDS)
    yield Measure("pages", len(pages), PAGES)


def _loaded() -> list[str]:
    """The package's modules that a training process imports."""
    words = [sys.executable, "-W", "ignore", "-c", LOADS]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


if __name__ == "__main__":
    sys.exit(main())
