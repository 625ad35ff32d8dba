"""The checks of ``megatron-muon doctor``; each says what it found, or why Muon cannot
run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_muon
from megatron_muon.lab.bench import seams as bench_seams
from megatron_muon.lab.doctor import core_seams, cpu_seams
from megatron_muon.lab.dry_run import seams as dry_run_seams
from megatron_muon.mcore.seams.row import Row
from megatron_muon.mcore.seams.rows import (
    CORE,
    check_row,
    check_rows,
    described_version,
    megatron_version,
    rows_of,
)
from megatron_muon.megatron_lm.launch import (
    ON_CPU,
    MixedInstallationError,
    check_installation,
    has_helper,
    helper_fault,
    sign_of_gpu,
    version_of,
    what_to_install,
)
from megatron_muon.presence import (
    WAY_OUT,
    SeamError,
    Version,
    core_version,
    require_core,
)

_OLDEST_TORCH = (2, 4)
_TE = "transformer-engine", "transformer_engine"
# By distribution: a module of it, and what is missing without it.
_PACKAGES = {
    "transformer-engine": (_TE[1], ""),
    "apex": ("apex.optimizers", ""),  # PyPI's package of that name is another
    "triton": ("triton", ": a GPU's fused kernels and emerging_optimizers need it"),
    "emerging_optimizers": (
        "emerging_optimizers",
        ": Megatron's own Muon needs it and triton",
    ),
}
_REQUIRES_PYTHON = re.compile(
    r"^requires-python\s*[:=]\s*[\"']?([^\"'\n]*?>=\s*(\d+(?:\.\d+)*)[^\"'\n]*)",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Examined:
    """A row of the report; ``fault`` says why Muon cannot run, with the way out, or is
    empty.
    """

    name: str
    value: str
    fault: str = ""


def examine(checkout: Path | None) -> list[Examined]:
    """Make all checks; of those that import Megatron, the first with a fault is the
    last.

    Megatron is that of a Megatron-LM ``checkout``, or the installed one.
    """
    if checkout is not None:
        sys.path.insert(0, str(checkout))
    rows = list(_environment())
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        # about missing packages, which have rows of their own
        warnings.simplefilter("ignore")
        for row in _megatron(checkout):
            rows.append(row)
            if row.fault:
                break
    return rows


def _environment() -> Iterator[Examined]:
    yield Examined("python", f"{platform.python_version()} ({sys.executable})")
    folder = _folder(megatron_muon.__file__)
    yield Examined("megatron_muon", f"{megatron_muon.__version__} ({folder})")
    try:
        import torch
    except ImportError as error:
        fault = f"torch cannot be imported ({error}): install torch"
        yield Examined("torch", "none", fault)
        return
    version = torch.__version__
    old = tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_TORCH
    fault = f"torch {version} is too old: install 2.4 or newer" if old else ""
    yield Examined("torch", version, fault)
    yield _device(torch)
    for name, (module, needs) in _PACKAGES.items():
        found = _installed(name.replace("_", "-"), module)
        yield Examined(name, found + needs if found == "none" else found)
    if importlib.util.find_spec("psutil") is None:
        why = "saves in torch_dist hang without it"
        yield Examined("psutil", f"none: {why}; pip install psutil")


def _device(torch: Any) -> Examined:
    if torch.cuda.is_available():
        return Examined(
            "device", f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
        )
    sign = sign_of_gpu()
    if sign is None:
        build = "" if torch.version.cuda else " (this torch is built for CPUs)"
        return Examined("device", f"no GPU: the CPU runtime would be on{build}")
    way_out = (
        f"check nvidia-smi and CUDA_VISIBLE_DEVICES, or give {ON_CPU} to run on the CPU"
    )
    return Examined("device", "no GPU", f"torch sees no GPU, but {sign}: {way_out}")


def _megatron(checkout: Path | None) -> Iterator[Examined]:
    """Checks that import Megatron, without a GPU under the CPU runtime."""
    where = _location("megatron.core")
    if where is None:
        fault = f"there is no megatron.core: {WAY_OUT}, or name one to this command"
        yield Examined("megatron-core", "none", fault)
        return
    training = _location("megatron.training")
    folder = checkout or (training and training.parent.parent)
    if folder is not None:
        yield _checkout(folder)
    try:
        require_core()
    except SeamError as error:
        yield Examined("megatron-core", f"{core_version()} ({where})", str(error))
    patched = folder is not None and is_patched(folder)
    if folder is not None:
        way = "is not in: use the launcher, or patches/README.md"
        yield Examined("patch", "is in" if patched else way)
    yield _core(where)
    from megatron.core import optimizer

    version = megatron_version()[1]
    yield dataset_helper(where / "datasets")
    yield _hooks("hooks", [*CORE, *core_seams.ROWS], needed=True)
    # a run needs none of these
    optional = [*core_seams.REFUSALS, *dry_run_seams.ROWS, *bench_seams.ROWS]
    if importlib.util.find_spec("emerging_optimizers"):
        optional += bench_seams.UPSTREAM
    yield _hooks("optional hooks", optional, needed=False)
    on_cpu = megatron_muon.cpu.enabled()
    yield _hooks("hooks without a GPU", cpu_seams.ROWS, needed=on_cpu)
    if folder is not None:
        # since core 0.17
        emerging = getattr(optimizer, "HAVE_EMERGING_OPTIMIZERS", False)
        yield Examined("plain command", plain_muon(version, patched, emerging))
        row = _training_hooks(folder)
        if checkout is None:
            # The megatron.training of an installed core (0.19 and later) runs no
            # script: not a fault.
            row = Examined(row.name, row.fault or row.value)
        yield row
    adam = optimizer.Adam  # or the CPU runtime's
    yield Examined("adam", f"{adam.__module__}.{adam.__qualname__}")
    te = tuple(int(part) for part in re.findall(r"\d+", _installed(*_TE))[:2])
    yield Examined("gradient norm", counted_wrongly(version, te))
    from megatron_muon.lab.doctor.options import refused_options

    yield Examined("refused options", ", ".join(refused_options()) or "none")
    if checkout is not None:
        yield helper_suffix(where / "datasets")


def _checkout(checkout: Path) -> Examined:
    try:
        check_installation(checkout)
    except MixedInstallationError as error:
        return Examined("megatron-lm", str(checkout), str(error))
    version = version_of(checkout / "megatron" / "core")
    return Examined("megatron-lm", f"core {version} ({checkout})")


def is_patched(checkout: Path) -> bool:
    """Whether a checkout's ``megatron.training`` imports the plugin, as ``patches/``
    has it.
    """
    file = checkout / "megatron" / "training" / "__init__.py"
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    return any(
        line.split("#")[0].strip() == "import megatron_muon.autoload" for line in lines
    )


def _core(where: Path) -> Examined:
    import torch

    try:
        if not torch.cuda.is_available():
            megatron_muon.cpu.enable()
        importlib.import_module("megatron.core.optimizer")
        version = described_version()
    except SeamError as error:  # of a version that only the import tells
        return Examined("megatron-core", f"({where})", str(error))
    except Exception as error:  # whatever a foreign package raises
        return Examined(
            "megatron-core", f"({where})", _not_imported("megatron.core", where, error)
        )
    return Examined("megatron-core", f"{version} ({where})")


def dataset_helper(folder: Path) -> Examined:
    """Megatron's compiled module for datasets, which its script makes at start, if it
    can.
    """
    if has_helper(folder):
        return Examined("dataset helper", "compiled")
    names = {path.name for path in folder.glob("helpers_cpp*.so")}
    other = "not compiled"
    if names:
        other = f"compiled for another Python ({', '.join(sorted(names))})"
    return Examined(
        "dataset helper", f"{other}: data needs it, mock data, too; make -C {folder}"
    )


def helper_suffix(folder: Path) -> Examined:
    """Whether Megatron's ``make`` compiles the dataset helper for this Python."""
    program = shutil.which("python3-config") or "none"
    return Examined("python3-config", program, helper_fault(folder))


def _hooks(name: str, table: Sequence[Row], *, needed: bool) -> Examined:
    """How many of the rows that hold here the installed code has; a fault if a run
    needs others.
    """
    text, version = megatron_version()
    rows = rows_of(version, table)
    missing: dict[str, str] = {}
    for row in rows:
        try:
            check_row(row, text)
        except (SeamError, ImportError) as error:
            missing[str(row)] = str(error)
        # whatever a foreign package raises where it is imported
        except Exception as error:
            missing[str(row)] = _not_read(row, error)
    texts = [f"{len(rows) - len(missing)} of {len(rows)}"]
    texts += [f"not {row}" for row in missing]
    fault = next(iter(missing.values()), "") if needed else ""
    return Examined(name, ", ".join(texts), fault)


def _not_read(row: Row, error: Exception) -> str:
    why = f"{row.module} cannot be imported: {type(error).__name__}: {error}"
    if isinstance(error, OSError) and row.module.startswith("torch."):
        why += (
            ". torch's compiler has a cache there: set TORCHINDUCTOR_CACHE_DIR "
            "to a folder of yours"
        )
    return why


def plain_muon(version: Version, patched: bool, emerging: bool) -> str:
    """The Muon that ``--optimizer muon --use-distributed-optimizer`` starts without the
    launcher.

    It depends on core's version, the patch, and whether core finds emerging_optimizers.
    """
    if patched:
        return "Distributed Muon, by the patch"
    way = "Distributed Muon takes the launcher or the patch"
    if version < (0, 16):
        return f"an error, since this Megatron-LM has no --optimizer muon; {way}"
    if version < (0, 18):
        return (
            f"an error, since Megatron's own Muon takes no distributed optimizer; {way}"
        )
    if not emerging:
        return f"an error, since Megatron's own Muon needs emerging_optimizers; {way}"
    return (
        "Megatron's own layer-wise Muon, which turns the distributed optimizer off "
        f"without a word: not Distributed Muon; {way}"
    )


def _training_hooks(checkout: Path) -> Examined:
    from megatron_muon.megatron_lm.install import install_training

    try:
        install_training()
        check_rows(core_seams.TRAINING)
    except SeamError as error:
        return Examined("training hooks", "not all", str(error))
    except Exception as error:  # whatever a checkout raises where it is imported
        fault = _not_imported(
            "megatron.training", checkout / "megatron" / "core", error
        )
        return Examined("training hooks", "not read", fault)
    return Examined("training hooks", "all")


def _not_imported(module: str, core: Path, error: Exception) -> str:
    """Why a module of Megatron's cannot be imported; where Python is too old, the one
    it needs.
    """
    what = f"{type(error).__name__}: {error}"
    why = _older_python(core)
    if why is None and isinstance(error, ModuleNotFoundError):
        install = what_to_install(core, error)
        what = f"{what}: {install}" if install else what
    return f"{why} ({what})" if why else f"{module} cannot be imported: {what}"


def _older_python(core: Path) -> str | None:
    """An error text where this Python is older than a folder ``megatron/core`` asks
    for, else None.

    A checkout's pyproject.toml says it, or the metadata of an installed distribution.
    """
    root = core.parent.parent
    for file in (
        root / "pyproject.toml",
        *sorted(root.glob("megatron_core-*.dist-info/METADATA")),
    ):
        text = file.read_text(errors="replace") if file.is_file() else ""
        wanted = _REQUIRES_PYTHON.search(text)
        if wanted is None:
            continue
        oldest = tuple(int(part) for part in wanted[2].split("."))
        if sys.version_info[: len(oldest)] < oldest:
            return (
                f"megatron-core {version_of(core)} needs Python {wanted[1]} ({file}), "
                f"and this is Python {platform.python_version()}: run it with that "
                "one, or take an older core"
            )
    return None


def counted_wrongly(core: Version, te: tuple[int, ...]) -> str:
    """Weights that Megatron's norm, and with it AdamW's clip, counts wrongly where TP
    splits.

    They are marked as cut over TP and are not, or the reverse: every core has some.
    ``te`` is Transformer Engine's version, empty without it.
    """
    first = ["learnable softmax offsets"] if core >= (0, 15) else []
    if core < (0, 16):
        first.append("norms in Mamba mixers")
    if te >= (2, 13) and core < (0, 19):
        first.append("Transformer Engine's grouped experts")
    wrong = [f"{' and '.join(first)} on the first TP rank alone"]
    if te and (0, 13) <= core < (0, 17):
        wrong.append("Transformer Engine's MLA down projections once a TP rank")
    return (
        f"Megatron's counts {', '.join(wrong)} with TP > 1, so that its clip is wrong "
        "there; a run of Muon counts each weight once, AdamW's is Megatron's"
    )


def _location(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return _folder(spec.origin) if spec is not None and spec.origin else None


def _folder(file: str | None) -> Path:
    assert file is not None
    return Path(file).resolve().parent


def _installed(distribution: str, module: str) -> str:
    try:
        if importlib.util.find_spec(module) is None:
            return "none"
    except ImportError:
        return "none"
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
