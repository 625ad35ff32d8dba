"""A rank whose save is killed: it loads, checks, saves, and says where in the save it is.

That is known by what it opens and renames (``sys.addaudithook``): the rank, or the process that
writes for it, says so to the parent and waits, and is killed there, or goes on and is killed a
moment later.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import io
import json
import os
import re
import signal
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

SHARDS, METADATA, DIGEST, NAMING = "shards", "metadata", "digest", "tracker"
PHASES = (SHARDS, METADATA, DIGEST, NAMING)
TRACKER = "latest_checkpointed_iteration.txt"
LIMIT = 200.0  # seconds that ranks may take to load and to get to where they are killed
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Spec:
    """What is to be done.

    Attributes:
        through: "training" or "core".
        format: of Megatron-LM: torch_dist or torch.
        background: save asynchronously.
        tp, dp: sizes.
        kills: how many.
        seed: of all choices.
    """

    through: str
    format: str
    background: bool
    tp: int
    dp: int
    kills: int
    seed: int


@dataclass(frozen=True)
class Plan:
    """One kill.

    Attributes:
        phase: of ``PHASES``.
        nth: of the places in that phase.
        victim: "all", "worker" (of an asynchronous save) or the number of a rank.
        late: seconds after it; 0: exactly there.
        again: save the iteration anew that is there.
        generation: of the content that is saved.
    """

    phase: str
    nth: int
    victim: str
    late: float
    again: bool
    generation: int


class Watch:
    """Says to the parent that the place of a plan has come, and waits there."""

    def __init__(self, plan: Plan, rank: int, tell: int, wait: int) -> None:
        self.plan, self.rank, self.tell, self.wait = plan, rank, tell, wait
        self.seen = self.begun = 0
        self.on = False

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event == "open" and self.phase_of(args) == self.plan.phase:
            self.come()

    def come(self) -> None:
        self.seen += 1
        if self.seen == self.plan.nth + 1:
            say(self.tell, pid=os.getpid(), parent=os.getppid(), at=self.plan.phase)
            if not self.plan.late:
                os.read(self.wait, 1)

    def phase_of(self, args: tuple[Any, ...]) -> str | None:
        path, _, flags = args
        if not isinstance(path, (str, os.PathLike)):
            return None
        name = os.path.basename(os.fspath(path))
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if not writes or name == "":
            return None
        if name.startswith("megatron_muon.json"):
            self.begun += 1
            return DIGEST if self.begun > 1 else None
        if re.fullmatch(r"__\d+_\d+\.distcp", name):
            return SHARDS
        if name.startswith((".metadata", "metadata.json")):
            return METADATA
        return NAMING if name == TRACKER else None


def say(pipe: int, **what: Any) -> None:
    os.write(pipe, (json.dumps(what) + "\n").encode())


@contextlib.contextmanager
def half_written(watch: Watch) -> Iterator[None]:
    """torch.save writes from C++, which no audit hook sees: it stops with half of a file."""
    import torch

    own = torch.save

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if watch.on and watch.plan.phase == SHARDS and isinstance(f, (str, os.PathLike)):
            content = io.BytesIO()
            own(obj, content, *args, **kwargs)
            with open(f, "wb") as file:
                file.write(content.getvalue()[: len(content.getvalue()) // 2])
            watch.come()
        own(obj, f, *args, **kwargs)

    torch.save = save
    try:
        yield
    finally:
        torch.save = own


def named_tensors(built: Any) -> Iterator[tuple[str, Any]]:
    """All that a checkpoint must bring back on this rank; TP replicas by one name."""
    import torch

    from megatron_muon.mcore.wiring.buffers.shards import owned_shards
    from support.models.gpt import distributed_optimizers

    names = {param: name for name, param in built.params.items()}

    def name_of(param: Any) -> str:
        cut = getattr(param, "tensor_model_parallel", False)
        return f"{built.tp_rank if cut else 'any'}.{built.pp_rank}.{names[param]}"

    for param in names:
        yield name_of(param), param.data
    for part in distributed_optimizers(built.optimizer):
        part._fill_state()
        for param, shard in owned_shards(part):
            where = f"{name_of(param)}.{built.dp_rank}"
            yield f"{where}.main", shard.data
            for key, value in part.optimizer.state[shard].items():
                if torch.is_tensor(value) and value.shape == shard.shape and key != "step":
                    yield f"{where}.{key}", value


def content(name: str, iteration: int, generation: int, like: Any) -> Any:
    """What a tensor has at an iteration: known without any run."""
    import torch

    seed = zlib.crc32(f"{name} {iteration} {generation}".encode())
    return torch.rand(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


def compared(built: Any, iteration: int, folder: str) -> dict[str, Any]:
    """The generation of what was loaded, and ``wrong``: what is of none that was begun."""
    import torch

    wrong = ["no save of that iteration began"]
    for line in reversed(_begun(folder).read_text().splitlines()):
        number, generation = map(int, line.split())
        if number == iteration:
            wrong = [
                name
                for name, tensor in named_tensors(built)
                if not torch.equal(tensor, content(name, iteration, generation, tensor))
            ]
            if not wrong:
                return {"generation": generation, "wrong": []}
    return {"generation": None, "wrong": wrong[:3]}


def fill(built: Any, iteration: int, generation: int = 0) -> None:
    import torch

    with torch.no_grad():
        for name, tensor in named_tensors(built):
            tensor.copy_(content(name, iteration, generation, tensor))


def begin(built: Any, iteration: int, generation: int, folder: str) -> None:
    """Fill with what is then saved, and note it."""
    import torch.distributed as dist

    fill(built, iteration, generation)
    if dist.get_rank() == 0:
        with _begun(folder).open("a") as file:
            file.write(f"{iteration} {generation}\n")
    dist.barrier()


def _begun(folder: str) -> Path:
    return Path(folder).with_suffix(".begun")


def arguments(spec: Spec, folder: str) -> Any:
    """Megatron-LM's, as a run's."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training import global_vars

    sys.argv = [
        "pretrain_gpt.py",
        *"--num-layers 2 --hidden-size 96 --num-attention-heads 6 --seq-length 32".split(),
        *"--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 12".split(),
        *"--train-iters 9 --save-interval 1 --lr 1e-3 --bf16".split(),
        *"--optimizer muon --use-distributed-optimizer".split(),
        *f"--tensor-model-parallel-size {spec.tp} --save {folder} --load {folder}".split(),
        *f"--ckpt-format {spec.format} --no-gradient-accumulation-fusion".split(),
        *"--transformer-impl local --distributed-backend gloo --no-persist-layer-norm".split(),
        *"--attention-backend unfused --no-masked-softmax-fusion --no-rope-fusion".split(),
        *(["--async-save"] if spec.background else []),
    ]
    arguments_module = importlib.import_module("megatron.training.arguments")
    args = arguments_module.parse_args()
    arguments_module.validate_args(args)
    args.padded_vocab_size = 128
    global_vars.set_args(args)
    init_num_microbatches_calculator(args.rank, None, 12, 1, spec.dp)
    return args


def through_training(spec: Spec, plan: Plan, folder: str, watch: Watch) -> None:
    """Load, check, save, by Megatron-LM's own functions."""
    import megatron_muon
    from support.models.gpt import Case, Topology, build, make_optimizer

    args = arguments(spec, folder)
    checkpointing = importlib.import_module("megatron.training.checkpointing")
    built = build(Case(), Topology(tp=spec.tp, dp=spec.dp))
    built.optimizer = make_optimizer(built)
    assert megatron_muon.meter(built.optimizer) is not None
    args.consumed_train_samples = 0
    iteration = loaded_by_training(checkpointing, args, built, folder, watch)
    iteration += not (plan.again and iteration)
    begin(built, iteration, plan.generation, folder)
    watch.on = True
    with half_written(watch):
        checkpointing.save_checkpoint(iteration, built.chunks, built.optimizer, None, 0)
        if spec.background:
            async_utils = importlib.import_module("megatron.training.async_utils")
            async_utils.maybe_finalize_async_save(blocking=True)
    say(watch.tell, saved=iteration)


def loaded_by_training(checkpointing: Any, args: Any, built: Any, folder: str, watch: Watch) -> int:
    """The iteration that the tracker names; where that is refused, the one that the error names."""
    if not Path(folder, TRACKER).exists():
        say(watch.tell, loaded=None, refused=None, wrong=[])
        return 0
    refused = None
    for _ in range(2):
        fill(built, -1)
        try:
            iteration, *_ = checkpointing.load_checkpoint(built.chunks, built.optimizer, None)
        except (ValueError, RuntimeError) as error:
            refused = str(error)
            step = re.search(r"--ckpt-step (\d+)", refused)
            if step is None or args.ckpt_step:
                say(watch.tell, loaded=None, refused=refused, wrong=[])
                return 0
            args.ckpt_step = int(step[1])
        else:
            break
    args.ckpt_step = None
    say(watch.tell, loaded=iteration, refused=refused, **compared(built, iteration, folder))
    return int(iteration)


def through_core(spec: Spec, plan: Plan, folder: str, watch: Watch) -> None:
    """Load what the time before left, if its digest lets one, and save beside it."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from torch.distributed.checkpoint.api import CheckpointException

    import megatron_muon
    from megatron_muon.mcore.load_check import digest
    from support.checkpoints import saving
    from support.models.gpt import Case, Topology, start

    built = start(Case(), Topology(tp=spec.tp, dp=spec.dp))
    megatron_muon.install()
    saving._as_in_its_day()
    format = saving.formats()[0]
    numbers = sorted(int(path.name.removeprefix("iter_")) for path in Path(folder).iterdir())
    torch.distributed.barrier()  # a rank that is ahead makes the next folder
    if numbers:
        last = f"{folder}/iter_{numbers[-1]:07d}"
        fill(built, -1)
        try:
            saving.load(built, last, format)
            say(watch.tell, loaded=numbers[-1], **compared(built, numbers[-1], folder))
        except (Exception, CheckpointException) as error:
            known = isinstance(error, digest.DigestError) and "is not complete" in str(error)
            empty = not any(Path(last).iterdir())  # nothing was begun in it
            wrong = [] if known or empty else [f"{type(error).__name__}: {error}"]
            say(watch.tell, loaded=None, wrong=wrong)
    else:
        say(watch.tell, loaded=None, wrong=[])
    number = (numbers or [0])[-1] + 1
    target = f"{folder}/iter_{number:07d}"
    os.makedirs(target, exist_ok=True)
    begin(built, number, plan.generation, folder)
    watch.on = True
    state = saving.sharded(built, format, is_loading=False)
    request = dist_checkpointing.save(state, target, async_sharded_save=spec.background)
    if spec.background:
        queue = AsyncCallsQueue()
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    say(watch.tell, saved=number)


def rank_main(spec: Spec, plan: Plan, folder: str, rank: int, store: str, watch: Watch) -> None:
    import torch
    import torch.distributed as dist

    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # none outlives a parent that stops
    faulthandler.dump_traceback_later(0.9 * LIMIT)
    size = spec.tp * spec.dp
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT),
    )
    sys.addaudithook(watch.hook)
    (through_training if spec.through == "training" else through_core)(spec, plan, folder, watch)
