"""Imports point down only, without circles, and importing the package is cheap."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from support import ROOT
from support.processes import printed

PACKAGE = ROOT / "megatron_muon"

# Lower rooms first. A module may import its own room and those in earlier lines, no
# other room of its own line. The facade is ``megatron_muon/__init__.py``.
TIERS = """
version presence console
settings
orthogonalize
planning
runtime
rules
mcore cpu
facade megatron_lm testing
lab autoload
__main__
"""
# Rooms of ``lab`` by the same rule.
LAB_TIERS = """
frozen interrupts json_text outputs progress tables
pricing ranks
dry_run
routes
plan
curves inspect trace
bench
doctor
accept
commands
"""
# Rooms of ``mcore`` by the same rule.
MCORE_TIERS = """
host seams
routing
checkpoint qk_clip
watching
wiring
"""


def numbered(tiers: str) -> dict[str, int]:
    """Each room with the number of its tier; the facade's name is empty."""
    lines = enumerate(tiers.replace("facade", "").strip().splitlines())
    return {room: tier for tier, rooms in lines for room in rooms.split(" ")}


TIER_OF = numbered(TIERS)
INNER_TIERS = {"lab": numbered(LAB_TIERS), "mcore": numbered(MCORE_TIERS)}
FILES = sorted(PACKAGE.rglob("*.py"))
# Integers only: what decides about matrices and messages, and the time model.
WITHOUT_TORCH = {"version", "presence", "console", "settings", "planning"}
WITHOUT_TORCH |= {"orthogonalize.iteration", "orthogonalize.numerics"}
WITHOUT_TORCH |= {f"lab.{room}" for room in ("pricing", "trace", "curves")}
# Of a checkpoint's files, those that hold no tensor.
WITHOUT_TORCH |= {
    f"mcore.checkpoint.{name}" for name in ("archives", "files", "manifest", "matrices")
}


def dotted(path: Path) -> str:
    """``planning.plan`` for its file; "" for the facade."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str, outer: str = "") -> str:
    """``lab`` for ``lab.plan.command``; ``plan`` within ``lab``, and "" for ``lab``
    itself and outside of it.
    """
    if outer and not module.startswith(f"{outer}."):
        return ""
    return module.removeprefix(f"{outer}.").split(".")[0]


MODULES = {dotted(path): path for path in FILES}


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def own_imports(path: Path) -> set[str]:
    """Modules of this package that a file imports."""
    modules = set()
    for name in imports(path):
        root, _, rest = name.partition(".")
        if root != "megatron_muon":
            continue
        while rest not in MODULES:
            rest = rest.rpartition(".")[0]
        modules.add(rest)
    return modules


@pytest.mark.parametrize("outer", ["", *INNER_TIERS])
def test_imports_point_down(outer: str) -> None:
    """Among all rooms, but for the facade, which imports lazily: the cost test holds
    it. And among those within a room.
    """
    tier_of = INNER_TIERS.get(outer, TIER_OF)
    for path in FILES:
        own = room(dotted(path), outer)
        for module in own_imports(path) if own else ():
            other = room(module, outer)
            if other != own and other in tier_of:
                named = f"{path} imports {module or 'the facade'}"
                assert tier_of[other] < tier_of[own], named


def test_every_room_has_a_tier() -> None:
    assert {room(module) for module in MODULES} <= TIER_OF.keys()


def named_modules(path: Path) -> set[str]:
    """Modules of this package that a file imports or names in a string, a template's
    start too.
    """
    strings = {
        node.value.removeprefix("megatron_muon.")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("megatron_muon.")
    }
    return own_imports(path) | strings


def test_nothing_outside_the_lab_names_a_module_of_the_lab() -> None:
    """But for the command, which imports it where no script is run."""
    outside = [path for path in FILES if room(dotted(path)) not in ("lab", "__main__")]
    naming = {str(path) for path in outside if any(map(in_lab, named_modules(path)))}
    assert naming == set()
    command = ast.parse((PACKAGE / "__main__.py").read_text())
    modules = [node.module for node in command.body if isinstance(node, ast.ImportFrom)]
    assert not any(str(module).startswith("megatron_muon") for module in modules)


def in_lab(module: str) -> bool:
    return room(module) == "lab"


def test_plan_hands_typed_runs_on() -> None:
    """And reaches Megatron-LM's flags and hooks by what makes a run of a command line:
    ``CommandLine.settled``, for a script by ``arguments_of``.
    """
    climbing = set()
    for path in FILES:
        lab = room(dotted(path), "lab")
        above = {other for other in own_imports(path) if room(other) == "megatron_lm"}
        if above and lab in ("plan", "dry_run", "routes"):
            climbing.add(dotted(path))
        if lab == "plan":
            nodes = ast.walk(ast.parse(path.read_text()))
            names = {node.id for node in nodes if isinstance(node, ast.Name)}
            assert names.isdisjoint({"Any", "Namespace"}), path
    assert climbing == {"lab.routes.model_flags", "lab.dry_run.script"}


def test_no_modules_import_each_other() -> None:
    graph = {module: own_imports(path) - {module} for module, path in MODULES.items()}
    assert list(circles(graph)) == []


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str]()}
    assert list(circles(graph)) == ["b", "c"]


def circles(graph: Mapping[str, set[str]]) -> Iterator[str]:
    """Modules that import themselves over others."""
    for start in graph:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting += graph[module]
        if start in seen:
            yield start


def test_each_room_imports_only_what_it_is_for() -> None:
    for path in FILES:
        module = dotted(path)
        tier = TIER_OF[room(module)]
        for name in imports(path):
            root = name.split(".")[0]
            if root == "megatron":
                assert tier >= TIER_OF["mcore"], f"{path} imports {name}"
            if root == "torch":
                own = {module, room(module), ".".join(module.split(".")[:2])}
                assert not own & WITHOUT_TORCH, f"{path} imports {name}"
            if name.startswith("torch.distributed"):
                assert tier >= TIER_OF["runtime"], f"{path} imports {name}"
            if root == "triton":
                kernels = (
                    "rules.fused_kernels",
                    "orthogonalize.symmetric_kernels",
                )
                assert module in kernels, f"{path} imports {name}"
            if root == "matplotlib":
                assert module == "lab.outputs", f"{path} imports {name}"


def test_a_checkpoint_is_inspected_without_megatron() -> None:
    """Whose import takes seconds and warns."""
    loaded = (
        "import sys, megatron_muon.lab.inspect.report; print('megatron' in sys.modules)"
    )
    assert printed("-c", loaded).strip() == "False"


def test_no_folder_has_more_than_a_dozen_files() -> None:
    modules = [path for path in FILES if path.name != "__init__.py"]
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in modules)
    assert {folder: count for folder, count in counts.items() if count > 12} == {}


COLLECTIVES = (
    "all_reduce all_gather all_gather_object all_gather_into_tensor broadcast reduce "
    "reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single barrier send "
    "recv isend irecv batch_isend_irecv gather scatter new_group gather_object "
    "broadcast_object_list scatter_object_list"
).split()
DISTRIBUTED = ("dist", "torch.distributed", "distributed")


def callers(*functions: str) -> set[str]:
    """Modules that call one of these functions, by their full names."""
    return {
        dotted(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in functions
    }


def test_every_collective_is_called_in_one_module() -> None:
    names = [f"{module}.{name}" for module in DISTRIBUTED for name in COLLECTIVES]
    assert callers(*names) == {"runtime.collectives"}


def test_lines_of_a_run_are_printed_by_say_which_takes_any_encoding() -> None:
    """A command's are printed by print: ``run_command`` does the same for all of its
    stdout.
    """
    of_runs = {each for each in callers("print") if not in_lab(each)}
    assert of_runs == {"console"}


def _loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*sorted(sys.modules))"
    return {name.split(".")[0] for name in printed("-c", code).split()}


def test_importing_the_package_pulls_in_nothing_heavy() -> None:
    loaded = _loaded_after("import megatron_muon; megatron_muon.MuonConfig()")
    assert loaded.isdisjoint({"megatron", "torch", "numpy", "matplotlib"})


def test_the_cpu_runtime_is_there_without_another_import() -> None:
    """As the README calls it; it needs torch, so it is imported when it is first
    named.
    """
    loaded = _loaded_after("import megatron_muon; megatron_muon.cpu.enabled()")
    assert "torch" in loaded and "megatron" not in loaded


def test_plans_are_made_without_torch() -> None:
    modules = (
        "planning.plan",
        "planning.describe",
        "lab.pricing.step",
        "lab.pricing.upstream",
    )
    statement = "import " + ", ".join(f"megatron_muon.{module}" for module in modules)
    assert "torch" not in _loaded_after(statement)
