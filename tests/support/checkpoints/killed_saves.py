"""A process that forks ranks again and again; each time they load, check, save, and are killed.

``python killed_saves.py SPEC`` with SPEC a ``Spec`` as JSON; a line of JSON for each time is
printed. With ``through`` "training" the ranks call a checkout's own save_checkpoint and
load_checkpoint, the checkout being first on PYTHONPATH; with "core" dist_checkpointing's.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support.checkpoints.killed_ranks import (
    DIGEST,
    LIMIT,
    METADATA,
    NAMING,
    PHASES,
    SHARDS,
    TRACKER,
    Plan,
    Spec,
    Watch,
    rank_main,
    say,
)


def import_everything(through: str) -> None:
    import typing_override  # noqa: F401

    import megatron_muon.cpu.on  # noqa: F401

    if through == "training":
        import megatron_muon.cpu.training as training
        from megatron_muon.megatron_lm.install import install_training

        training.enable()
        install_training()
    from megatron.core import dist_checkpointing  # noqa: F401
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401

    from support.checkpoints import saving
    from support.models import gpt  # noqa: F401

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
    stuck = heard.open and time.monotonic() >= end
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
    errors = [f"neither saved nor there within {LIMIT:g} s"] if stuck else []
    if not killed:
        errors += [line["error"] for line in heard.all("error")]
    return {
        **asdict(plan),
        "killed": killed,
        "loaded": [line["loaded"] for line in loads],
        "generations": len({line.get("generation") for line in loads}),
        "refused": [line["refused"] for line in loads if line.get("refused")],
        "wrong": [wrong for line in loads for wrong in line["wrong"]],
        "finished": bool(heard.all("saved")),
        "errors": errors,
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
        phases.remove(NAMING)
    generation = 0
    while True:
        for phase in choice.sample(phases, len(phases)):
            victims = ["all", *map(str, range(spec.tp * spec.dp))]
            if spec.background and phase == SHARDS:
                victims = ["worker", *victims]
            generation += 1
            yield Plan(
                phase=phase,
                nth=0 if phase in (DIGEST, NAMING) else choice.randrange(2),
                victim=choice.choice(victims),
                late=choice.choice([0.0, 0.0, choice.uniform(0.001, 0.05)]),
                again=choice.random() < 0.3,
                generation=generation,
            )


def tracker_of(folder: Path) -> int | None:
    """The iteration that the tracker names; None for none, and where it was cut off."""
    path = folder / TRACKER
    text = path.read_text() if path.exists() else ""
    return int(text) if text else None


def lost(result: dict[str, Any], before: list[int], named: int | None, folder: Path) -> list[str]:
    """What is wrong with what was loaded before a kill, and with what is there after it.

    Args:
        result: of ``one_time``.
        before: iterations that were complete when it began.
        named: the one that the tracker named.
        folder: of the checkpoints.
    """
    from megatron_muon.mcore.load_check import digest

    faults = ["ranks loaded different saves"] if result["generations"] > 1 else []
    (loaded,) = {*result["loaded"]} or {None}
    last = before[-1] if before and result["refused"] else None  # else a start without a tracker
    due = named if named in before else last
    if result["loaded"] and loaded != due:
        faults.append(f"loaded {result['loaded']}, to load was {due}, of {before}")
    if named is not None and named not in before and not result["refused"]:
        faults.append(f"the tracker named {named}, which is not complete, and nobody was told")
    target = (loaded or 0) + (not (result["again"] and loaded))
    harmed = {*before} - {target, *digest.complete_iterations(folder)}
    if harmed:
        faults.append(f"{sorted(harmed)} were complete, and only {target} was saved")
    return faults


def main(spec: Spec) -> None:
    import_everything(spec.through)
    from megatron_muon.mcore.load_check import digest

    folder = Path(tempfile.mkdtemp(prefix="killed"))
    log = folder.with_suffix(".log")
    saves = folder / "saves"
    saves.mkdir()
    saves.with_suffix(".begun").touch()
    count = 0
    try:
        for plan in plans(spec):
            before, named = digest.complete_iterations(saves), tracker_of(saves)
            result = {**one_time(spec, plan, str(saves), log), "log": ""}
            if spec.through == "training" and not result["errors"]:
                result["wrong"] += lost(result, before, named, saves)
            if result["wrong"] or result["errors"]:
                result["log"] = log.read_text()[-6000:]
            print(json.dumps(result), flush=True)
            if result["wrong"] or result["errors"]:
                break
            count += result["killed"]
            log.unlink(missing_ok=True)
            kept = {*digest.complete_iterations(saves)[-3:], tracker_of(saves)}
            for old in sorted(saves.glob("iter_*"))[:-3]:
                if digest.iteration_of(old.name) not in kept:
                    shutil.rmtree(old)
            if count >= spec.kills + 1:  # the last is followed by a load, too
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Spec(**json.loads(sys.argv[1])))
