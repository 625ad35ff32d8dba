"""The README and docs/: short, with links that lead somewhere and commands that
somebody runs.
"""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

import megatron_muon
from megatron_muon.settings.run_flags import FLAGS
from support import documents
from support.documents import PAGES, ROOT
from support.megatron_lm.flag_parsers import DECLARED
from support.processes import printed

tomllib = pytest.importorskip(
    "tomllib", reason="the standard library has it from Python 3.11 on"
)

TABLE = tomllib.loads(documents.TABLE.read_text(encoding="utf-8"))
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
IN_DOCUMENTS = {
    command for page in PAGES for command in documents.commands(page.read_text())
}


def _rows() -> list[str]:
    return [
        command
        for part in TABLE.values()
        for lines in part.values()
        for command in lines
    ]


def _functions(file: str) -> set[str]:
    """The functions of a test file, wherever below tests/ it is."""
    (path,) = (ROOT / "tests").rglob(file)
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


# --- commands -------------------------------------------------------------------------


def test_every_command_of_the_documents_has_one_row() -> None:
    rows = _rows()
    assert sorted(IN_DOCUMENTS - set(rows)) == []
    assert sorted({row for row in rows if rows.count(row) > 1}) == []


def test_every_row_is_a_command_of_the_documents() -> None:
    assert sorted(set(_rows()) - IN_DOCUMENTS) == []


@pytest.mark.parametrize("name", TABLE["run"])
def test_the_test_that_runs_a_command_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    assert function in _functions(file)


# --- pages ----------------------------------------------------------------------------


def test_the_readme_is_a_page() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 110] == []


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for target in documents.links(page.read_text()):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in documents.anchors(file.read_text()), target


@EVERY_PAGE
def test_flags_that_a_page_names_are_there(page: Path) -> None:
    known = {flag.option for flag in FLAGS} | DECLARED["later"].keys()  # Megatron's
    assert documents.flags(page.read_text()) <= known


def test_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in nav
    for page in (ROOT / "examples").glob("*/README.md"):
        assert f": {page.relative_to(ROOT).as_posix()}\n" in nav


def test_generated_pages_are_what_the_code_says() -> None:
    code = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert code["stale"]() == [], "run python docs/generate.py"


def test_the_changelog_keeps_its_form() -> None:
    """Keep a Changelog: the newest first, its six kinds of change, once each."""
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert releases[0].startswith("[Unreleased]\n")
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for release in releases:
        headings = re.findall(r"^### (.*)$", release, re.MULTILINE)
        assert headings or release == "[Unreleased]\n\n"
        assert len(headings) == len(set(headings)) and set(headings) <= kinds
        assert re.findall(r"\n\n- ", re.sub(r"### .*\n\n?- ", "", release)) == []


def test_the_citation_has_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert citation.startswith("cff-version: 1.2.0\n")
    assert f"\nversion: {megatron_muon.__version__}\n" in citation
    assert "\nlicense: Apache-2.0\n" in citation and "arXiv:2502.16982" in citation


@pytest.mark.parametrize(
    "url, link",
    [
        ("", "Validation (docs/validation.md)"),
        ("https://host/tree/", "[Validation](https://host/tree/docs/validation.md)"),
    ],
)
def test_a_package_index_gets_no_link_to_a_file_of_the_clone(
    url: str, link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCUMENTS_URL", url)
    egg_info = f"setup.py -q egg_info --egg-base {tmp_path}"
    printed(*egg_info.split())
    (info,) = tmp_path.glob("*.egg-info/PKG-INFO")
    assert link in info.read_text() and documents.links(info.read_text()) == []


PLACE = re.compile(
    r"(?<![\w.-])(?:megatron_muon|tests|examples|patches|docs)/[\w./*-]*[\w*/]"
)
MODULE = re.compile(r"(?<![\w/])megatron_muon(?:\.(?!json\b|lock\b)[a-z_]\w*)+")


@EVERY_PAGE
def test_places_that_a_page_names_are_there(page: Path) -> None:
    """Files and folders by their path, tests by name, modules and public names by
    dotted ones.
    """
    text = page.read_text()
    for name in re.findall(r"\btest_[\w*]+\.py", text):
        assert any((ROOT / "tests").rglob(name)), name
    for place in PLACE.findall(text):
        assert any(ROOT.glob(place.rstrip("/"))) or "/out" in place, place
    for name in MODULE.findall(text):
        parts = name.split(".")
        path = ROOT.joinpath(*parts)
        owner = ROOT.joinpath(*parts[:-1])
        is_there = path.is_dir() or path.with_suffix(".py").exists()
        for file in (owner.with_suffix(".py"), owner / "__init__.py"):
            is_there = is_there or (file.exists() and parts[-1] in file.read_text())
        assert is_there, name


DEFINED = re.compile(r"`(\w+)` in `([\w/]+\.py)`")


@EVERY_PAGE
def test_a_name_that_a_page_places_in_a_module_is_defined_there(page: Path) -> None:
    for name, module in DEFINED.findall(page.read_text()):
        files = (ROOT / "megatron_muon").rglob(module)
        definition = re.compile(rf"^(class |def |.*, )?{name}\b.*[=:]", re.MULTILINE)
        assert any(definition.search(file.read_text()) for file in files), (
            f"{name} in {module}"
        )


def test_versions_sh_names_tests_that_are_there() -> None:
    text = (ROOT / "tests/versions.sh").read_text()
    found = re.findall(r'"\$TESTS"/([\w/]+)\{([\w,]*)\}\.py', text)
    names = [f"{stem}{each}.py" for stem, every in found for each in every.split(",")]
    assert len(names) > 3 and all(
        (ROOT / "tests/megatron_lm" / x).is_file() for x in names
    )
