"""A process that forks ranks again and again; each time they load, check, save, and are killed.

``python killed_saves.py SPEC`` with SPEC a ``Spec`` as JSON; a line of JSON for each time is
printed. With ``through`` "training" the ranks call a checkout's own save_checkpoint and
load_checkpoint, the checkout being first on PYTHONPATH; with "core" dist_checkpointing's.

Where in a save the ranks are is known by what they open and rename (``sys.addaudithook``): a rank,
or the process that writes for it, says so to the parent and waits, and is killed there, or goes on
and is killed a moment later.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

SHARDS, METADATA, DIGEST = "shards", "metadata", "digest"
BEFORE, AFTER = "before the tracker", "after the tracker"
PHASES = (SHARDS, METADATA, DIGEST, BEFORE, AFTER)
TRACKER = "latest_checkpointed_iteration.txt"
LIMIT = 400.0  # seconds that ranks may take to load and to get to where they are killed


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
    """

    phase: str
    nth: int
    victim: str
    late: float
    again: bool


# --- on a rank -------------------------------------------------------------------------------


class Watch:
    """Says to the parent that the place of a plan has come, and waits there."""

    def __init__(self, plan: Plan, rank: int, tell: int, wait: int) -> None:
        self.plan, self.rank, self.tell, self.wait = plan, rank, tell, wait
        self.seen = self.begun = 0
        self.renamed = False
        self.on = False

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on or event not in ("open", "os.rename"):
            return
        phase = self.phase_of(event, args)
        if phase == self.plan.phase:
            self.come()

    def come(self) -> None:
        self.seen += 1
        if self.seen == self.plan.nth + 1:
            say(self.tell, pid=os.getpid(), parent=os.getppid(), at=self.plan.phase)
            if not self.plan.late:
                os.read(self.wait, 1)

    def phase_of(self, event: str, args: tuple[Any, ...]) -> str | None:
        if event == "os.rename":
            self.renamed = os.path.basename(os.fspath(args[1])) == TRACKER
            return BEFORE if self.renamed else None
        path, _, flags = args
        if not isinstance(path, (str, os.PathLike)):
            return None
        if self.renamed:  # the folder is opened to be synced
            self.renamed = False
            return AFTER
        name = os.path.basename(os.fspath(path))
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if not writes or name == "":
            return None
        if name.startswith("megatron_muon.json"):
            self.begun += 1
            return DIGEST if self.begun > 1 else None
        if re.fullmatch(r"megatron_muon\..*part\.json.*", name):
            return DIGEST
        if re.fullmatch(r"__\d+_\d+\.distcp", name):
            return SHARDS
        if name.startswith((".metadata", "metadata.json")):
            return METADATA
        return BEFORE if name.startswith(TRACKER) else None


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
    """All that a checkpoint must bring back on this rank."""
    import torch
    from gpt import distributed_optimizers

    place = f"{built.tp_rank}.{built.pp_rank}"
    for name, param in built.params.items():
        yield f"{place}.{name}", param.data
    for number, part in enumerate(distributed_optimizers(built.optimizer)):
        part._fill_state()
        inner = part.optimizer
        for group, shards in enumerate(inner.param_groups):
            for index, shard in enumerate(shards["params"]):
                where = f"{place}.{built.dp_rank}.{number}.{group}.{index}"
                yield f"{where}.main", shard.data
                for key, value in inner.state[shard].items():
                    if torch.is_tensor(value) and value.shape == shard.shape and key != "step":
                        yield f"{where}.{key}", value


def content(name: str, iteration: int, like: Any) -> Any:
    """What a tensor has at an iteration: known without any run."""
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {iteration}".encode()))
    return torch.rand(like.shape, generator=generator).to(like.dtype)


def differences(built: Any, iteration: int) -> list[str]:
    import torch

    return [
        name
        for name, tensor in named_tensors(built)
        if not torch.equal(tensor, content(name, iteration, tensor))
    ]


def fill(built: Any, iteration: int) -> None:
    import torch

    with torch.no_grad():
        for name, tensor in named_tensors(built):
            tensor.copy_(content(name, iteration, tensor))


def arguments(spec: Spec, folder: str) -> Any:
    """Megatron-LM's, as a run's."""
    import importlib

    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training import global_vars

    sys.argv = [
        "pretrain_gpt.py",
        *"--num-layers 2 --hidden-size 96 --num-attention-heads 6 --seq-length 32".split(),
        *"--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8".split(),
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
    init_num_microbatches_calculator(args.rank, None, 8, 1, spec.dp)
    return args


def through_training(spec: Spec, plan: Plan, folder: str, watch: Watch) -> None:
    """Load, check, save, by Megatron-LM's own functions."""
    import importlib

    import torch
    from gpt import Case, Topology, build, make_optimizer

    import megatron_muon

    args = arguments(spec, folder)
    checkpointing = importlib.import_module("megatron.training.checkpointing")
    built = build(Case(), Topology(tp=spec.tp, dp=spec.dp))
    built.optimizer = make_optimizer(built)
    assert megatron_muon.meter(built.optimizer) is not None
    args.consumed_train_samples = 0
    iteration = 0
    if Path(folder, TRACKER).exists() or any(Path(folder).glob("*.before")):
        fill(built, -1)
        iteration, *_ = checkpointing.load_checkpoint(built.chunks, built.optimizer, None)
        say(watch.tell, loaded=iteration, wrong=differences(built, iteration)[:3])
    else:
        say(watch.tell, loaded=None, wrong=[])
    iteration += not (plan.again and iteration)
    fill(built, iteration)
    torch.distributed.barrier()
    watch.on = True
    with half_written(watch):
        checkpointing.save_checkpoint(iteration, built.chunks, built.optimizer, None, 0)
        if spec.background:
            async_utils = importlib.import_module("megatron.training.async_utils")
            async_utils.maybe_finalize_async_save(blocking=True)
    say(watch.tell, saved=iteration)


def through_core(spec: Spec, plan: Plan, folder: str, watch: Watch) -> None:
    """Load what the time before left, if its digest lets one, and save beside it."""
    import saving
    import torch
    from gpt import Case, Topology, start
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from torch.distributed.checkpoint.api import CheckpointException

    import megatron_muon
    from megatron_muon import digest

    built = start(Case(), Topology(tp=spec.tp, dp=spec.dp))
    megatron_muon.install()
    saving._as_in_its_day()
    format = saving.formats()[0]
    numbers = sorted(int(path.name.removeprefix("iter_")) for path in Path(folder).iterdir())
    if numbers:
        last = f"{folder}/iter_{numbers[-1]:07d}"
        fill(built, -1)
        try:
            saving.load(built, last, format)
            wrong = differences(built, numbers[-1])[:3]
            say(watch.tell, loaded=numbers[-1], wrong=wrong)
        except (Exception, CheckpointException) as error:
            known = isinstance(error, digest.DigestError) and "is not complete" in str(error)
            empty = not any(Path(last).iterdir())  # nothing was begun in it
            wrong = [] if known or empty else [f"{type(error).__name__}: {error}"]
            say(watch.tell, loaded=None, wrong=wrong)
    else:
        say(watch.tell, loaded=None, wrong=[])
    number = (numbers or [0])[-1] + 1
    fill(built, number)
    target = f"{folder}/iter_{number:07d}"
    os.makedirs(target, exist_ok=True)
    torch.distributed.barrier()
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


# --- the parent ------------------------------------------------------------------------------


def import_everything(through: str) -> None:
    import typing_override  # noqa: F401

    import megatron_muon.cpu.on  # noqa: F401

    if through == "training":
        import megatron_muon.cpu.training as training
        from megatron_muon.training.install import install_training

        training.enable()
        install_training()
    import gpt  # noqa: F401
    import saving
    from megatron.core import dist_checkpointing  # noqa: F401
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401

    saving._as_in_its_day()


def fork_ranks(spec: Spec, plan: Plan, folder: str, log: Path) -> tuple[list[int], int, int]:
    """The ranks, where they speak, and what lets them go on when it is closed."""
    heard, tell = os.pipe()
    wait, go = os.pipe()
    with tempfile.NamedTemporaryFile(delete=False) as file:
        store = file.name
    os.unlink(store)
    pids = []
    for rank in range(spec.tp * spec.dp):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(heard)
                os.close(go)
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                watch = Watch(plan, rank, tell, wait)
                rank_main(spec, plan, folder, rank, store, watch)
                code = 0
            except BaseException as error:
                traceback.print_exc()
                with contextlib.suppress(OSError):
                    say(tell, error=f"{type(error).__name__}: {error}", rank=rank)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    os.close(tell)
    os.close(wait)
    return pids, heard, go


class Heard:
    """What the ranks have said, line by line."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.rest, self.lines, self.open = pipe, b"", [], True

    def listen(self, seconds: float) -> None:
        if not self.open or not select.select([self.pipe], [], [], max(0.0, seconds))[0]:
            return
        data = os.read(self.pipe, 65536)
        self.open = bool(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        self.lines += [json.loads(line) for line in lines]

    def all(self, key: str) -> list[Any]:
        return [line for line in self.lines if key in line]


def one_time(spec: Spec, plan: Plan, folder: str, log: Path) -> dict[str, Any]:
    """Fork, listen, kill; returns what was loaded and what was killed."""
    pids, pipe, go = fork_ranks(spec, plan, folder, log)
    heard = Heard(pipe)
    end = time.monotonic() + LIMIT
    while heard.open and time.monotonic() < end:
        heard.listen(0.2)
        if heard.all("at") or heard.all("error"):
            break
        if len(heard.all("saved")) == len(pids):
            break
    killed = bool(heard.all("at"))
    if killed:
        time.sleep(plan.late)
        kill(plan, pids, heard.all("at")[0])
    os.close(go)
    if killed and plan.victim != "all":  # the others go on, as far as they get
        end = time.monotonic() + random.Random(plan.late).choice([0.05, 0.5, 2.0])
        while heard.open and time.monotonic() < end:
            heard.listen(0.1)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(pipe)
    loads = heard.all("loaded")
    return {
        **asdict(plan),
        "killed": killed,
        "loaded": [line["loaded"] for line in loads],
        "wrong": [wrong for line in loads for wrong in line["wrong"]],
        "finished": bool(heard.all("saved")),
        "errors": [] if killed else [line["error"] for line in heard.all("error")],
    }


def kill(plan: Plan, pids: list[int], at: dict[str, Any]) -> None:
    if plan.victim == "worker":
        victims = [pid for pid in (at["pid"], at["parent"]) if pid not in (*pids, os.getpid())]
    elif plan.victim == "all":
        for pid in pids:
            os.killpg(pid, signal.SIGKILL)
        return
    else:
        victims = [pids[int(plan.victim)]]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def plans(spec: Spec) -> Iterator[Plan]:
    """Without end; phases in turn."""
    choice = random.Random(spec.seed)
    phases = [phase for phase in PHASES if spec.format != "torch" or phase != METADATA]
    if spec.through == "core":
        phases = [phase for phase in phases if phase not in (BEFORE, AFTER)]
    while True:
        for phase in choice.sample(phases, len(phases)):
            victims = ["all", *map(str, range(spec.tp * spec.dp))]
            if spec.background and phase == SHARDS:
                victims = ["worker", *victims]
            yield Plan(
                phase=phase,
                nth=0 if phase == AFTER else choice.randrange(2),
                victim=choice.choice(victims),
                late=choice.choice([0.0, 0.0, choice.uniform(0.001, 0.05)]),
                again=choice.random() < 0.2,
            )


def tracker_of(folder: Path) -> int | None:
    path = folder / TRACKER
    return int(path.read_text()) if path.exists() else None


def lost(result: dict[str, Any], before: int | None, folder: Path) -> list[str]:
    """What is wrong with what the tracker says after a kill, and with what was loaded before it."""
    from megatron_muon import digest

    now = result["tracker"]
    found = []
    if before is not None and set(result["loaded"]) != {before}:
        found.append(f"loaded {result['loaded']}, the tracker named {before}")
    (last,) = {*result["loaded"]} or {None}
    if last and not result["again"] and (now is None or now < last):
        found.append(f"{last} was loaded, then the tracker named {now}")
    if last and result["again"] and now is None and not any(folder.glob("*.before")):
        found.append(f"{last} was to be saved anew, and is nowhere")
    if now is not None and not (digest.read(folder / f"iter_{now:07d}") or {}).get("complete"):
        found.append(f"the tracker names {now}, which is not complete")
    return found


def main(spec: Spec) -> None:
    import_everything(spec.through)
    folder = Path(tempfile.mkdtemp(prefix="killed"))
    log = folder.with_suffix(".log")
    saves = folder / "saves"
    saves.mkdir()
    count, before = 0, None
    try:
        for plan in plans(spec):
            result = one_time(spec, plan, str(saves), log)
            result |= {"tracker": tracker_of(saves), "log": ""}
            if spec.through == "training" and not result["errors"]:
                result["wrong"] += lost(result, before, saves)
                before = result["tracker"]
            if result["wrong"] or result["errors"]:
                result["log"] = log.read_text()[-6000:]
            print(json.dumps(result), flush=True)
            if result["wrong"] or result["errors"]:
                break
            count += result["killed"]
            log.unlink(missing_ok=True)
            for old in sorted(path for path in saves.glob("iter_*") if path.suffix == "")[:-3]:
                if old.name != f"iter_{result['tracker'] or 0:07d}":
                    shutil.rmtree(old)
            if count >= spec.kills + 1:  # the last is followed by a load, too
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Spec(**json.loads(sys.argv[1])))
