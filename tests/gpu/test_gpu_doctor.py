"""Would Muon run here?"""

from __future__ import annotations

import re

import pytest

from support.gpu.settings import Report, Settings, ended

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]
_PATH = re.compile(r" \(/[^)]*\)")  # of this machine, which a report does not need


def test_muon_would_run_here(settings: Settings, report: Report) -> None:
    done = ended(settings, "doctor")
    report(
        text="; ".join(_PATH.sub("", line) for line in done.stdout.splitlines() if line)
    )
    assert done.returncode == 0, done.stdout + done.stderr
