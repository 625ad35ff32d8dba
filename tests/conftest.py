"""Same start for every test: tests/ importable by the rank workers, fixed seeds, one
thread, or MEGATRON_MUON_THREADS.
"""

import dataclasses
import fnmatch
import gc
import os
import random
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = os.path.dirname(os.path.abspath(__file__))
for path in (os.path.dirname(HERE), HERE, os.path.join(HERE, "python311")):
    if path not in sys.path:
        sys.path.insert(0, path)

import pytest  # noqa: E402 after the path is set
import torch  # noqa: E402
import typing_override  # noqa: E402, F401
from hypothesis import settings  # noqa: E402

torch.set_num_threads(int(os.environ.get("MEGATRON_MUON_THREADS", "1")))
# A slow or busy machine is no failure; the whole suite has its own limit.
settings.register_profile("megatron_muon", deadline=None)
settings.load_profile("megatron_muon")

import megatron_muon.cpu  # noqa: E402
import support.te_on_cpu.on  # noqa: E402, F401 Transformer Engine's Python, where it is on the path

# Before any test module imports Megatron. Tests run on the CPU, also where there is a
# GPU; those of tests/gpu give it to their ranks.
megatron_muon.cpu.enable(allow_cuda=True)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Torch's deterministic mode."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def newer_option() -> Iterator[None]:
    """Torch's newer option allows tf32, where the old one cannot be read then."""
    if not hasattr(torch.backends.mkldnn, "matmul"):
        pytest.skip("torch before 2.9 has the old option only")
    option = torch.backends.cuda.matmul
    before = option.fp32_precision
    option.fp32_precision = "tf32"
    yield
    option.fp32_precision = before


def pytest_addoption(parser: pytest.Parser) -> None:
    gpu = parser.getgroup("tests/gpu", "as megatron-muon accept --help says")
    gpu.addoption("--device", choices=["cuda", "cpu"])
    gpu.addoption("--ranks", type=int)
    gpu.addoption("--hardware", default="h100")
    gpu.addoption("--set", action="append", default=[])


def pytest_make_parametrize_id(val: object) -> str | None:
    """A case or a topology names a test by what it is, without ``ids``."""
    is_record = dataclasses.is_dataclass(val)
    return str(val) if is_record and type(val).__str__ is not object.__str__ else None


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m says
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark those of ``slow.txt``."""
    slow: dict[str, list[str]] = {}
    with open(os.path.join(HERE, "slow.txt")) as lines:
        for line in lines:
            file, _, pattern = line.strip().partition("::")
            slow.setdefault(file, []).append(pattern)
    for item in items:
        path, _, test = item.nodeid.partition("::")
        patterns = slow.get(path.rpartition("/")[2], ())
        if any(fnmatch.fnmatchcase(test, pattern) for pattern in patterns):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Take what exists by now out of garbage collection: torch, Megatron and thousands
    of tests.

    Else each of its rounds, which the virtual GPU makes with every rank, looks through
    all of it.
    """
    gc.collect()
    gc.freeze()
