"""Settings of the tests on GPUs, and what they record for the report of ``megatron-muon
accept``.

This process never computes on a GPU: ranks in processes of their own do. Without a GPU
a test runs over gloo, or its code runs on the virtual GPU; it is skipped only then, as
a claim about a GPU that was not held.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from megatron_muon.lab.accept.results import (
    COLLECTED,
    ENVIRONMENT,
    FIGURE,
    LOOKED_AT,
    Figure,
)
from support.gpu.environment import described
from support.gpu.settings import Check, Report, Settings, settings_of


def pytest_configure(config: pytest.Config) -> None:
    """A wrong flag ends pytest before any test, where these tests are asked for by
    their path.
    """
    _settings(config)


@pytest.fixture(scope="session")
def settings(pytestconfig: pytest.Config) -> Settings:
    return _settings(pytestconfig)


def _settings(config: pytest.Config) -> Settings:
    given = [config.getoption(name) for name in ("device", "ranks", "hardware", "set")]
    try:
        return settings_of(*given)
    except (ValueError, TypeError, OSError) as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session", autouse=True)
def _recorded(
    request: pytest.FixtureRequest,
    settings: Settings,
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    names = [
        item.nodeid for item in request.session.items if item.get_closest_marker("gpu")
    ]
    record_testsuite_property(COLLECTED, json.dumps(names))
    record_testsuite_property(ENVIRONMENT, json.dumps(described(settings)))


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Report:
    """Records figures, and a text on what was looked at."""

    def record(*figures: Figure, text: str = "") -> None:
        for figure in figures:
            record_property(FIGURE, figure.as_json())
        if text:
            record_property(LOOKED_AT, text)

    return record


@pytest.fixture
def needs_gpu(settings: Settings) -> Check:
    """Called once the code has run: without a GPU the claim itself was not held."""

    def check() -> None:
        if not settings.gpus:
            pytest.skip("no GPU")

    return check
