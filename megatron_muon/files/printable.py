"""Texts from files, for a terminal."""

from __future__ import annotations


def printable(text: str, kept: str = "") -> str:
    """A text whose control characters are escaped, except those in ``kept``."""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )
