"""What mkdocs does beside building docs/: pages from elsewhere in the clone, and links
to them.

Links in the sources are those of the clone, so that they work in an editor and on a
code host. A link to a page or picture of the site is rewritten to it; one to another
file becomes its text.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
ELSEWHERE = ("*.md", "examples/**/*.md", "examples/*/figures/*.png", "patches/*.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
OVERVIEW = "index.md"  # the site's first page is the README
NOTEBOOK = "examples/tutorial/one_step.ipynb"


def on_config(config: Any) -> Any:
    """Name the release at the foot of each page."""
    text = (ROOT / "megatron_muon" / "version.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"', text, re.M)
    config.copyright = f"megatron_muon {version}, {config.copyright}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures outside docs/ under their paths in the clone."""
    for path in _elsewhere():
        name = path.relative_to(ROOT).as_posix()
        name = OVERVIEW if name == "README.md" else name
        files.append(File.generated(config, name, abs_src_path=str(path)))
    name = NOTEBOOK.replace(".ipynb", ".md")
    files.append(File.generated(config, name, content=_notebook()))
    return files


def _notebook() -> str:
    """The notebook as a page, with what its cells printed."""
    parts = []
    for cell in json.loads((ROOT / NOTEBOOK).read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join(line for output in cell["outputs"] for line in output["text"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Rewrite a page's relative links from the clone's paths to the site's.

    The search ranks pages for users above examples.
    """
    here = page.file.src_uri
    if here != "coefficients.md" and (ROOT / "docs" / here).exists():
        page.meta.setdefault("search", {"boost": 4})
    return LINK.sub(lambda link: _rewritten(link, here, files), markdown)


def _elsewhere() -> list[Path]:
    pages = {path for pattern in ELSEWHERE for path in ROOT.glob(pattern)}
    return sorted(path for path in pages if "out" not in path.parts)


def _rewritten(link: re.Match[str], here: str, files: Any) -> str:
    mark, text, target, anchor = link[1], link[2], link[3], link[4] or ""
    if re.match(r"[a-z]+:", target):
        return link[0]
    in_docs = (ROOT / "docs" / here).exists()
    folder = posixpath.dirname(posixpath.join("docs", here) if in_docs else here)
    path = posixpath.normpath(posixpath.join(folder, target))
    if not (ROOT / path).exists():
        return link[0]  # mkdocs warns
    uri = OVERVIEW if path == "README.md" else path.removeprefix("docs/")
    uri = uri.replace(".ipynb", ".md")
    if files.get_file_from_path(uri) is None:
        return text
    target = posixpath.relpath(uri, posixpath.dirname(here) or ".")
    return f"{mark}[{text}]({target}{anchor})"
