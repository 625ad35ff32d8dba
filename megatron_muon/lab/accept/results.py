"""Tests on GPUs and their figures, as data: what pytest's junit XML says of them."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["ok", "FAILED", "not run"]
# Names of the properties that tests record.
FIGURE, LOOKED_AT = "figure", "looked at"
COLLECTED, ENVIRONMENT = "collected", "environment"  # of the whole suite
NO_TIME = "no time was left for it: see --minutes"
EXACT = (1.0, 1.0)  # bounds of a ratio


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that was predicted, measured, or both."""

    name: str
    unit: str
    predicted: float | None = None  # both are None where there is none
    measured: float | None = None
    least: float = 0.8  # bounds of measured / predicted within which it is as predicted
    most: float = 1.25
    # of the time model (pricing.hardware), which a wrong prediction corrects
    constant: str = ""
    # value to set that constant to, if the measurement gives one
    value: float | None = None
    corrects: str = ""  # in words, what else a wrong prediction corrects

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where one is missing or the predicted value is
        0.
        """
        if self.predicted is None or self.measured is None:
            return None
        if self.predicted == 0:
            return 1.0 if self.measured == 0 else None
        return self.measured / self.predicted

    @property
    def is_compared(self) -> bool:
        """Whether there are both values."""
        return self.predicted is not None and self.measured is not None

    @property
    def as_predicted(self) -> bool:
        """Whether the measured value is within the bounds; False where no ratio
        exists.
        """
        ratio = self.ratio
        return ratio is not None and self.least <= ratio <= self.most

    def as_json(self) -> str:
        """Its fields; numbers that are not finite become null."""
        fields = dataclasses.asdict(self)
        odd = [
            key for key, value in fields.items() if str(value) in ("nan", "inf", "-inf")
        ]
        return json.dumps(fields | dict.fromkeys(odd))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A test after its run; it is one claim."""

    name: str  # the claim
    verdict: Verdict  # ok, FAILED or not run
    text: str = ""  # what was looked at, the fault, or why it was not run
    seconds: float = 0.0  # wall time
    figures: tuple[Figure, ...] = ()  # its numbers
    log: str = ""  # pytest's account of a failure


@dataclass(frozen=True, slots=True)
class Check:
    """The tests of one file, ``test_gpu_NAME.py``; at least one."""

    name: str
    tests: tuple[Outcome, ...]

    @property
    def verdict(self) -> Verdict:
        """``FAILED`` if a test failed; ``ok`` if one was run; else ``not run``."""
        verdicts = {test.verdict for test in self.tests}
        if "FAILED" in verdicts:
            return "FAILED"
        return "ok" if "ok" in verdicts else "not run"

    @property
    def missing(self) -> int:
        """Number of tests that were not run."""
        return sum(test.verdict == "not run" for test in self.tests)

    @property
    def seconds(self) -> float:
        """Wall time of all of them."""
        return sum(test.seconds for test in self.tests)


def read(
    names: Sequence[str], asked: Sequence[str], junit: Path, ended: str
) -> tuple[dict[str, str], list[Check]]:
    """The environment that the tests name, and all checks in order.

    ``asked`` are those that pytest was to run, ``junit`` is its XML, if it came to
    write it, and ``ended`` how it ended, where that was an error of its own.
    """
    root = ElementTree.Element("none")
    if junit.exists():
        root = ElementTree.parse(junit).getroot()
    of_suite = {
        each.get("name"): json.loads(each.get("value", ""))
        for each in root.iterfind("testsuite/properties/property")
    }
    tests: dict[str, list[Outcome]] = {name: [] for name in names}
    ran = set()
    for case in root.iter("testcase"):
        file = (case.get("classname") or "").split(".")[-1]
        ran.add((file, case.get("name", "")))
        tests.setdefault(file.removeprefix("test_gpu_"), []).append(_test(case))
    for test in of_suite.get(COLLECTED, []):
        path, _, function = test.partition("::")
        file = Path(path).stem
        if (file, function) not in ran:
            late = Outcome(_claim(function), "not run", NO_TIME)
            tests.setdefault(file.removeprefix("test_gpu_"), []).append(late)
    for name, of_file in tests.items():
        if ended and name in asked:
            of_file.append(Outcome("pytest ends well", "FAILED", ended))
        elif not of_file:
            why = "not asked for by --only"
            if name in asked:
                why = "no test was collected"
            of_file.append(Outcome(name, "not run", why))
    checks = [Check(name, tuple(of_file)) for name, of_file in tests.items()]
    return of_suite.get(ENVIRONMENT, {}), checks


def _claim(function: str) -> str:
    name, bracket, case = function.partition("[")
    words = name.removeprefix("test_").replace("_", " ")
    return f"{words}, {case.removesuffix(']')}" if bracket else words


def _test(case: ElementTree.Element) -> Outcome:
    recorded = [
        (each.get("name"), each.get("value", "")) for each in case.iter("property")
    ]
    test = Outcome(
        name=_claim(case.get("name", "")),
        verdict="ok",
        text="; ".join(value for name, value in recorded if name == LOOKED_AT),
        seconds=float(case.get("time", 0)),
        figures=tuple(
            Figure(**json.loads(value)) for name, value in recorded if name == FIGURE
        ),
    )
    by_tag = {element.tag: element for element in case}
    bad = by_tag.get("failure", by_tag.get("error"))
    if bad is not None:
        why = bad.get("message", "")
        log = bad.text or ""
        return dataclasses.replace(test, verdict="FAILED", text=why, log=log)
    if "skipped" in by_tag:
        why = by_tag["skipped"].get("message", "")
        return dataclasses.replace(test, verdict="not run", text=why)
    return test
