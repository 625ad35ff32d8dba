"""The file of JSON lines that a run appends its records to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Lines:
    """Appends records to a file, each as one line in one write.

    Args:
        path: the file; its folder is made where it is missing.

    Raises:
        OSError: the file cannot be opened for writing.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and not self._ends_with_a_line()
        with self.path.open("ab") as file:
            if torn:  # the run before was killed in the middle of a line
                file.write(b"\n")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record.

        Raises:
            OSError: it cannot be written.
        """
        text = json.dumps(record, separators=(",", ":"), allow_nan=False)
        with self.path.open("ab") as file:
            file.write(text.encode() + b"\n")

    def _ends_with_a_line(self) -> bool:
        with self.path.open("rb") as file:
            if file.seek(0, 2) == 0:
                return True
            file.seek(-1, 2)
            return file.read(1) == b"\n"
