"""Imports point down only, and importing the package is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_muon"

# Lower tiers first; a module may import its own tier and those above it in this list.
TIERS = [
    (
        "integers",
        [
            *("arrangement", "buckets", "claim", "coefficients", "config", "digest"),
            *("digest_parts", "digest_text", "durable", "homes", "iteration"),
            *("layout", "ordering", "pickles", "plan", "pricing", "regular", "report"),
            *("round_table", "rounds", "setting_names"),
        ],
    ),
    ("tensors", ["archive", "checksum", "newton_schulz", "products", "torch_dist", "update"]),
    ("communication", ["collectives", "agreement", "exchange", "phases"]),
    ("optimizer", ["optimizer"]),
    ("megatron", ["mcore", "cpu"]),
    ("training", ["training"]),
    ("tools", ["cli", "launch", "autoload", "__main__"]),
]
TIER_OF = {module: tier for tier, (_, modules) in enumerate(TIERS) for module in modules}
INTEGERS, COMMUNICATION, MEGATRON = 0, 2, 4
FILES = sorted(PACKAGE.rglob("*.py"))


def _module(path: Path) -> str:
    """The first name below the package: "plan", "mcore", … or "" for the facade."""
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if name == "__init__" else name


def _imports(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    module = _module(path)
    if module == "":
        return  # the facade imports lazily; the cost test holds it
    tier = TIER_OF[module]
    for name in _imports(path):
        root, *rest = name.split(".")
        if root == "megatron_muon" and rest:
            assert TIER_OF[rest[0]] <= tier, f"{path.name} imports {name}"
        if root == "megatron":
            assert tier >= MEGATRON, f"{path.name} imports {name}"
        if root == "torch":
            assert tier > INTEGERS, f"{path.name} imports {name}"
        if name.startswith("torch.distributed"):
            assert tier >= COMMUNICATION, f"{path.name} imports {name}"
        if root == "matplotlib":
            assert path.name == "bench_plot.py", f"{path.name} imports {name}"


COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv", "gather", "scatter", "new_group"),
    *("broadcast_object_list", "gather_object", "scatter_object_list", "reduce"),
}


def test_every_collective_is_called_in_one_module() -> None:
    callers = {
        path.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in COLLECTIVES
        and ast.unparse(node.func.value) in {"dist", "torch.distributed", "distributed"}
    }
    assert callers == {"collectives.py"}


def _loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_importing_the_package_pulls_in_nothing_heavy() -> None:
    loaded = _loaded_after("import megatron_muon; megatron_muon.MuonConfig()")
    assert loaded.isdisjoint({"megatron", "torch", "numpy", "matplotlib"})


def test_the_cpu_runtime_is_there_without_another_import() -> None:
    """As the README calls it; it needs torch, so it is imported when it is first named."""
    loaded = _loaded_after("import megatron_muon; megatron_muon.cpu.enabled()")
    assert "torch" in loaded and "megatron" not in loaded


def test_the_integer_tier_runs_without_torch() -> None:
    assert "torch" not in _loaded_after("import megatron_muon.plan, megatron_muon.report")
