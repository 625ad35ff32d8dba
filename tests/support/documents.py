"""The documents as data: their files, commands in fenced blocks, links and flags."""

from __future__ import annotations

import re
from pathlib import Path

from support import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
TABLE = Path(__file__).with_name("commands_in_documents.toml")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def commands(text: str) -> list[str]:
    """The commands in a page's ``bash`` blocks, a line each, without comments."""
    normal_lines = []
    for language, block in FENCE.findall(text):
        if language == "bash":
            lines = re.sub(r"\\\n", " ", block).splitlines()
            normal_lines += [normal for line in lines if (normal := normalised(line))]
    return normal_lines


def normalised(line: str) -> str:
    """A command without its comment and with one space between words."""
    return " ".join(re.sub(r"(^|\s)#.*$", "", line).split())


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def links(text: str) -> list[str]:
    """Targets of links and pictures that are not on the web."""
    return [
        target
        for target in LINK.findall(prose(text))
        if not re.match(r"[a-z]+:", target)
    ]


def anchors(text: str) -> set[str]:
    """What headings are linked by, as mkdocs and code hosts make it."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in plain]
    return {re.sub(r"\s", "-", heading) for heading in words}


def flags(text: str) -> set[str]:
    """Muon's flags that a page names, in code or prose."""
    return set(re.findall(r"--(?:no-)?(?:muon-[\w-]*\w|adamw-from-muon)", text))
