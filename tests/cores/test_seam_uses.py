"""What the package uses of others' code is in the table: read from its syntax trees.

Imports in every form, attributes of what they bring, and attributes of Megatron's
objects as far as they go by the names that this code base gives them. What is in no row
has a reason here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from functools import cache

import pytest
import torch

from megatron_muon.lab.bench import seams as bench
from megatron_muon.lab.doctor import core_seams, cpu_seams
from megatron_muon.lab.dry_run import seams as dry_run
from megatron_muon.mcore.seams import rows, training
from megatron_muon.mcore.seams.row import Row
from megatron_muon.settings.run_flags import FLAGS
from support import ROOT
from support.megatron_uses import Use, own_names, uses_in, uses_in_text
from support.virtual_gpu.seams import SEAMS as VIRTUAL_GPU

PACKAGE = ROOT / "megatron_muon"
ROWS: tuple[Row, ...] = (
    *rows.CORE,
    *training.ROWS,
    *core_seams.ROWS,
    *core_seams.TRAINING,
    *core_seams.HYBRID,
    *core_seams.REFUSALS,
    *dry_run.ROWS,
    *dry_run.SCRIPT,
    *bench.ROWS,
    *bench.UPSTREAM,
    *bench.PACKAGE,
    *cpu_seams.ROWS,
    *cpu_seams.TRAINING,
)
SEAMS = [row for row in ROWS if row.use != "held"]
SYMBOLS = {str(row) for row in SEAMS}
MODULES = {row.module for row in ROWS}
ATTRIBUTES = {
    tuple(f"parameter.{row.name}".split(".")[-2:]) for row in ROWS if row.use == "held"
}
METHODS = {tuple(row.name.rsplit(".", 1)) for row in SEAMS if "." in row.name}
OURS = own_names(PACKAGE)

# In no row, and why.
EXCEPTIONS = {
    "torch.cpu._is_avx512_bf16_supported": (
        "read where torch has it; later ones have a public way"
    ),
    "megatron.core.optimizer.Adam.set_scaled_state": (
        "refused where Megatron's Adam lacks it"
    ),
    "torch.optim._muon": (
        "a peer of bench newton-schulz, which is left out where it is not"
    ),
    "torch.optim._muon._zeropower_via_newtonschulz": "likewise",
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": (
        "made where Megatron lacks it"
    ),
    "quack.gemm_interface.gemm_symmetric": (
        "kernels, which are tried before the first step"
    ),
    "megatron.core.optimizer.cpu_offloading.HybridDeviceOptimizer:param_groups": "torch's",
    "ChainedOptimizer:lower": "of a text: the optimizer of a config",
    "DistributedOptimizer:float16_groups": (
        "the benchmark's, of Float16OptimizerWithFloat16Params"
    ),
    "DistributedOptimizer:fp32_from_float16_groups": "likewise, which has both as rows",
    "parameter:use_muon": (
        "a mark since 0.20, in modules whose import needs kernels for a GPU"
    ),
}
# Arguments that are read, after Megatron-LM has checked them but for the first two.
ARGUMENTS = {
    "arguments:optimizer",  # the first thing that the wrapper of validate_args reads
    # before Megatron's checks, some of which fail without it
    "arguments:use_distributed_optimizer",
    # what is loaded
    "arguments:finetune",
    "arguments:no_load_optim",
    # how many buckets there are
    "arguments:ddp_num_buckets",
    "arguments:ddp_bucket_size",
    "arguments:overlap_grad_reduce",
}
# Modules that are named in a text with a gap, and what fills it.
GAPS = {
    "megatron.core.optimizer.{}": ("muon", "emerging_optimizers"),
    "megatron.core.transformer.moe.{}": ("moe_utils", "token_dispatcher"),
}
BASES = {
    "megatron.core.optimizer.ChainedOptimizer": "ChainedOptimizer",
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": "DistributedOptimizer",
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup": (
        "_ParamAndGradBucketGroup"
    ),
    "megatron.core.optimizer.cpu_offloading.HybridDeviceOptimizer": "HybridDeviceOptimizer",
}
TABLES = (
    "seams.py",
    "lab/doctor/core_seams.py",
    *(f"mcore/seams/{path.name}" for path in PACKAGE.glob("mcore/seams/*.py")),
)
EVERY_OBJECTS = (
    "__class__ __dict__ __file__ __init__ __name__ __new__ __path__ __module__ "
    "__qualname__"
).split()


def in_no_row(use: Use) -> bool:
    """Whether a use is in no row of the table, and is no exception."""
    if (
        use.symbol in EXCEPTIONS
        or use.symbol.split(".")[-1].split(":")[-1] in EVERY_OBJECTS
    ):
        return False
    owner, colon, name = use.symbol.partition(":")
    if colon:
        return not _is_known_attribute(BASES.get(owner, owner), name, use)
    for gap, fillings in GAPS.items():
        if use.symbol == gap or use.symbol.startswith(f"{gap}."):
            filled = [use.symbol.replace("{}", filling) for filling in fillings]
            return not all(_is_known_symbol(each) for each in filled)
    return not _is_known_symbol(use.symbol)


def _is_known_symbol(symbol: str) -> bool:
    """A row, or the module of one, or a package around that, or the class of one."""
    return any(f"{known}.".startswith(f"{symbol}.") for known in (*SYMBOLS, *MODULES))


def _is_known_attribute(owner: str, name: str, use: Use) -> bool:
    if (owner, name) in ATTRIBUTES or (owner, name) in METHODS:
        return True
    if owner == "arguments":
        ours = {flag.dest for flag in FLAGS} | OURS
        return use.defaulted or use.symbol in ARGUMENTS or name in ours
    if owner == "parameter":
        return hasattr(torch.nn.Parameter, name)
    if owner == "ChainedOptimizer" and name in ("param_groups", "state", "step"):
        return True  # torch's: ``optimizer`` is the inner Adam there
    made = _class(owner)
    if made is None:
        return False
    if hasattr(torch.nn.Module, name) and issubclass(made, torch.nn.Module):
        return True
    # what this package puts on its objects
    return not _has(made, name) and name in OURS


def _has(made: type, name: str) -> bool:
    own = [each for each in made.__mro__ if each.__module__.startswith("megatron.")]
    return any(name in vars(each) or f"self.{name}" in _source(each) for each in own)


_source = cache(inspect.getsource)  # slow


@cache
def _class(owner: str) -> type | None:
    modules = {
        row.module
        for row in ROWS
        if row.use == "held" and row.name.startswith(f"{owner}.")
    }
    modules |= {row.module for row in SEAMS if row.name == owner}
    for module in sorted(modules):
        try:
            made = getattr(importlib.import_module(module), owner, None)
        except ModuleNotFoundError:  # of later versions
            continue
        if isinstance(made, type):
            return made
    return None


def test_no_symbol_is_used_that_is_in_no_row() -> None:
    uses = [use for use in uses_in(PACKAGE) if not use.file.endswith(TABLES)]
    assert len(uses) > 400
    assert [str(use) for use in uses if in_no_row(use)] == []


def test_the_virtual_gpu_uses_only_symbols_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_a_c_type = {"torch.Tensor._make_wrapper_subclass"}  # which no test can rename
    symbols = SYMBOLS | of_a_c_type | {str(row) for row in VIRTUAL_GPU}
    monkeypatch.setattr(sys.modules[__name__], "SYMBOLS", symbols)
    uses = uses_in(ROOT / "tests" / "support" / "virtual_gpu")
    assert of_a_c_type <= {use.symbol for use in uses}
    assert [str(use) for use in uses if in_no_row(use)] == []


def test_every_exception_is_used() -> None:
    used = {use.symbol for use in uses_in(PACKAGE)}
    assert {*EXCEPTIONS, *GAPS, *ARGUMENTS} <= used


def test_a_use_that_is_in_no_row_is_found() -> None:
    text = """
import importlib
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron_muon.runtime.patches import replaced
class Ours(DistributedOptimizer):
    def step(self):
        return self._copy_model_grads_to_main_grads()
def use(dist_opt):
    parallel_state.get_nothing()
    importlib.import_module("megatron.core.gone").anything()
    state = parallel_state
    with replaced(state, get_other=None):
        getattr(state, "get_third")
    return dist_opt.ddp_config, dist_opt.per_bucket_numel
"""
    symbols = {use.symbol for use in uses_in_text(text, "mcore/a.py") if in_no_row(use)}
    owner = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
    assert symbols == {
        f"{owner}:step",
        f"{owner}:_copy_model_grads_to_main_grads",
        "megatron.core.parallel_state.get_nothing",
        "megatron.core.gone",
        "megatron.core.gone.anything",
        "megatron.core.parallel_state.get_other",
        "megatron.core.parallel_state.get_third",
        "DistributedOptimizer:per_bucket_numel",
    }


def test_each_row_that_is_wrapped_has_a_wrapper() -> None:
    """Beside those of ``autoload``."""
    from megatron_muon.mcore.wiring import install

    wrapped = {row.name for row in rows.CORE if row.use == "wrapped"}
    assert wrapped == install._WRAPPERS.keys()
    of_scripts = {row.name for row in training.ROWS if row.use == "wrapped"}
    tree = ast.parse((PACKAGE / "megatron_lm/install.py").read_text())
    (table,) = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_WRAPPERS"
    )
    assert isinstance(table, ast.Dict)
    names = {key.value for key in table.keys if isinstance(key, ast.Constant)}
    assert of_scripts == names
