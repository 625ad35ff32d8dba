"""The search of the site, as a person uses it: type, wait, read the first hits."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from support import ROOT
from support.browser import Browser, browser, missing

DOCS = ROOT / os.environ.get("VENV_DOCS", ".venv-docs") / "bin" / "python"
BOX = ".md-search__input"
ANY = "return document.querySelector('.md-search-result__item')"
NONE = ANY.replace("document", "!document")
HITS = """
    const hits = [...document.querySelectorAll(".md-search-result__item")];
    return hits.slice(0, 3).map(hit => {
        const [page, part] = hit.querySelectorAll("h1, h2");
        return [page.textContent, part ? part.textContent : ""].join(": ");
    });
"""
pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(not DOCS.exists(), reason="run bash docs/build.sh first"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [DOCS, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[Browser]:
    """A browser at the first page of the site, which a server sends."""
    handler = partial(Quiet, directory=str(site))
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        browser() as session,
    ):
        Thread(target=server.serve_forever, daemon=True).start()
        session.open(f"http://127.0.0.1:{server.server_port}/index.html")
        yield session
        server.shutdown()


def hits(session: Browser, words: str) -> list[str]:
    """The first three hits for words that are typed: page and best section.

    Hits of the first letters come first, so a person reads when they stand still.
    """
    session.type_into(BOX, "zzz")
    session.wait_for(NONE)
    session.type_into(BOX, words)
    session.wait_for(ANY)
    read: list[list[str]] = []
    while len(read) < 4 or read[-4:].count(read[-1]) < 4:
        time.sleep(0.2)
        read.append(session.script(HITS))
    return read[-1]


@pytest.mark.parametrize(
    "asked",
    """
    LoRA > Routing: Adapters
    OOM > Troubleshooting: CUDA out of memory
    wandb > Watch a run: Watch matrices
    resume > Checkpoints: Save and resume
    learning rate > Switching and tuning: Learning rate
    go back > Checkpoints: Go back
    slow link > Performance: Slow links
    hybrid > Validation: Hybrids
    Docker > Usage: Docker
    SFT > Fine-tuning
    --muon-split > Routing: Splits
    """.strip().splitlines(),
)
def test_the_first_hit_is_the_page_that_answers(served: Browser, asked: str) -> None:
    words, first = asked.strip().split(" > ")
    assert hits(served, words)[0].startswith(first)


def test_a_pasted_word_is_searched_for(served: Browser) -> None:
    served.type_into(BOX, "zzz ")
    served.wait_for(NONE)
    served.paste("Docker")
    served.wait_for(ANY)
    assert served.script(HITS) == ["Usage: Docker"]


def test_the_search_works_in_pages_opened_from_a_folder(site: Path) -> None:
    with browser() as session:
        session.open((site / "index.html").as_uri())
        assert hits(session, "SFT")[0].startswith("Fine-tuning")
