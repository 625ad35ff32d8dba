"""The engine knows no Muon: by its names, and by running without any module of
Muon's.
"""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

from support import ROOT, TESTS
from support.processes import printed

RUNTIME = ROOT / "megatron_muon" / "runtime"
MUONS = re.compile("muon|momentum|newton|schulz|orthogonal|nesterov", re.IGNORECASE)
# The package's own name in imports, and in the sentence that a trace's reader looks
# for.
OWN = {"megatron_muon", "MuonError"}
ALONE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        blocked = ("megatron_muon.orthogonalize", "megatron_muon.rules.muon")
        if name in blocked or name.startswith(blocked[0] + "."):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
from types import SimpleNamespace
import torch
import torch.distributed as dist
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.layout import Span
from megatron_muon.planning.rounds.rank_plan import RankPlan, RankRound
from megatron_muon.planning.layout import Matrix
from megatron_muon.planning.slices import Slice
from megatron_muon.runtime.engine import Engine
from megatron_muon.runtime.exchange.messages import Exchange
from megatron_muon.runtime.exchange.meter import Meter
from megatron_muon.runtime.states import States
from megatron_muon.runtime.tracing import phases
from support.runs.other_rules import Centred
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
matrix = Matrix("weight", 4, 6)
whole = Slice(parameter=0, matrix=0, rank=0, elements=Span(0, 24), start=0, replica=False)
own = RankPlan(0, {0: Span(0, 24)}, (RankRound(homes=[0], kept=[whole]),))
plan = SimpleNamespace(matrices=(matrix,), slices=(whole,), rounds=((0,),))
shard = torch.arange(1.0, 25.0)
shard.grad = torch.arange(24.0).sin()
group = dist.group.WORLD
exchange = Exchange(own, (matrix,), group, torch.float32, torch.device("cpu"), Meter())
engine = Engine(Centred(), plan, exchange, {0: shard}, phases())
adam = SimpleNamespace(state={shard: {}})
groups = [{"params": [shard], "lr": 0.5, "weight_decay": 0.0}]
weight, grad = shard.clone().view(4, 6), shard.grad.view(4, 6)
engine.step(groups, States(adam), lambda: None)
direction = grad / grad.norm()
direction = direction - direction.mean(dim=1, keepdim=True)
expected = weight - 0.5 * direction
torch.testing.assert_close(shard.view(4, 6), expected / expected.norm())
torch.testing.assert_close(adam.state[shard]["exp_avg"], shard.grad)
print("stepped")
"""


def _names(path: Path) -> set[str]:
    """The names in a file's code; not those in strings, comments and imports."""
    with tokenize.open(path) as source:
        tokens = list(tokenize.generate_tokens(source.readline))
    imports = {
        t.start[0] for t in tokens if t.string == "import" and t.type == tokenize.NAME
    }
    return {
        t.string
        for t in tokens
        if t.type == tokenize.NAME and t.start[0] not in imports
    }


def test_no_name_in_the_engine_is_muons() -> None:
    for path in sorted(RUNTIME.rglob("*.py")):
        muons = {name for name in _names(path) - OWN if MUONS.search(name)}
        assert muons == set(), path


def test_the_engine_steps_without_any_module_of_muons() -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{TESTS}"}
    assert printed("-W", "ignore", "-c", ALONE, **environment).strip() == "stepped"
