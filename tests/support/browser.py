"""A browser without a window, driven as a person drives it.

chromedriver speaks WebDriver (https://www.w3.org/TR/webdriver2) over HTTP, so that no
package is needed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--window-size=1400,900",
]
CAPABILITIES = {"alwaysMatch": {"goog:chromeOptions": {"args": ARGUMENTS}}}


class Browser:
    """A session of a chromedriver that listens at ``port``."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/session"
        session = self._call("", capabilities=CAPABILITIES)
        self.url += f"/{session['sessionId']}"

    def open(self, url: str) -> None:
        self._call("/url", url=url)

    def script(self, code: str, *arguments: Any) -> Any:
        """What the body of a function returns, run in the page."""
        return self._call("/execute/sync", script=code, args=list(arguments))

    def type_into(self, selector: str, text: str) -> None:
        """Replace the text of a box, key by key."""
        found = self._call("/element", using="css selector", value=selector)
        (name,) = found.values()
        self._call(f"/element/{name}/clear")
        self._call(f"/element/{name}/value", text=text)

    def paste(self, text: str) -> None:
        """Insert a text where the cursor is, without a key."""
        command = {"cmd": "Input.insertText", "params": {"text": text}}
        self._call("/goog/cdp/execute", **command)

    def wait_for(self, code: str, seconds: float = 10) -> Any:
        """The first value of ``script(code)`` that counts as true; the last one if
        none does.
        """
        end = time.monotonic() + seconds
        while not (value := self.script(code)) and time.monotonic() < end:
            time.sleep(0.05)
        return value

    def _call(self, path: str, **body: Any) -> Any:
        request = Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]


def missing() -> str:
    """Why there is no browser here; empty if there is one."""
    if shutil.which("chromedriver"):
        return ""
    return "there is no chromedriver (Debian's package chromium-driver)"


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser, which is closed at the end."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        lines = (re.search(r"on port (\d+)\.", line) for line in driver.stdout)
        port = next(int(found[1]) for found in lines if found)
        session = Browser(port)
        try:
            yield session
        finally:
            urlopen(Request(session.url, method="DELETE"), timeout=60).close()
    finally:
        driver.terminate()
        driver.communicate()
