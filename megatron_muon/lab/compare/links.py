"""Slow links on this machine: a network namespace for each rank, whose sending tc slows down.

Nothing here has a name in the file system. A descriptor of this process and the ranks in it hold a
namespace open. The kernel removes it, with its interfaces, once they have ended, however they end.
The host's own interfaces stay as they are.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

INTERFACE = "muon0"  # a rank's interface, each in a namespace of its own
BURST_SECONDS = 0.001  # of the rate, that may leave at once after a pause
LEAST_BURST = 16_384  # bytes; some packets
_QUEUE_SECONDS, _LEAST_QUEUE = 0.05, 1 << 20  # before an interface; a full one drops packets
_SWITCH = "switch"
_PATH = os.pathsep.join((os.defpath, "/usr/sbin", "/sbin"))  # not in every user's PATH
_CLONE_NEWNET = 0x40000000
_SECONDS = 30.0  # for a command, each of which takes milliseconds

_T = TypeVar("_T")


class LinkError(OSError):
    """Links cannot be made here; the text says at what it failed, and why."""


def burst(mbits: float) -> int:
    """Bytes that a link lets through at once after a pause."""
    return max(LEAST_BURST, int(1e6 * mbits / 8 * BURST_SECONDS))


def why_not() -> str | None:
    """Why no link can be made by this process; None where one was made, and is gone again."""
    try:
        with shaped(1, 100.0):
            return None
    except LinkError as error:
        return str(error)


@contextmanager
def shaped(world: int, mbits: float) -> Iterator[tuple[str, ...]]:
    """A namespace for each rank, joined by a bridge; what a rank sends is slowed to the rate.

    Only its senders slow what a rank receives.

    Args:
        world: number of ranks, at most 62 500.
        mbits: of a rank's link, in 10^6 bits per second.

    Yields:
        A path of each rank's namespace, for ``enter``.

    Raises:
        LinkError: this process may not, or the kernel or iproute2 cannot.
    """
    if not sys.platform.startswith("linux"):
        raise LinkError(f"network namespaces are Linux's, and this is {sys.platform}")
    ip, tc = (_program(name) for name in ("ip", "tc"))
    descriptors: list[int] = []
    try:
        for _ in range(world + 1):
            descriptors.append(_in_thread(_new_namespace))
        paths = tuple(f"/proc/{os.getpid()}/fd/{each}" for each in descriptors)
        _in_namespace(paths[-1], _bridge(ip, paths[:-1]))
        for rank, path in enumerate(paths[:-1]):
            _in_namespace(path, _end_of_link(ip, tc, rank, mbits))
        yield paths[:-1]
    finally:
        for each in descriptors:
            os.close(each)


def enter(paths: Sequence[str], rank: int) -> None:
    """Move the calling thread, and those it will start, to a rank's namespace; tell gloo.

    Raises:
        LinkError: the namespace is gone, or this process may not.
    """
    _set_namespace(paths[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def bytes_sent() -> int:
    """Bytes that left by this thread's link, with headers; 0 for a thread outside of ``shaped``."""
    try:
        with open("/proc/thread-self/net/dev", encoding="ascii") as lines:
            for line in lines:
                name, _, counts = line.partition(":")
                if name.strip() == INTERFACE:
                    return int(counts.split()[8])
    except OSError:
        pass  # another system than Linux
    return 0


def _bridge(ip: str, paths: Sequence[str]) -> list[list[str]]:
    commands = [
        [ip, "link", "add", "name", _SWITCH, "type", "bridge"],
        [ip, "link", "set", "dev", _SWITCH, "up"],
    ]
    for rank, path in enumerate(paths):
        port = f"port{rank}"
        peer = ["peer", "name", INTERFACE, "netns", path]
        commands += [
            [ip, "link", "add", "name", port, "type", "veth", *peer],
            [ip, "link", "set", "dev", port, "master", _SWITCH],
            [ip, "link", "set", "dev", port, "up"],
        ]
    return commands


def _end_of_link(ip: str, tc: str, rank: int, mbits: float) -> list[list[str]]:
    address = f"10.77.{rank // 250}.{rank % 250 + 1}/16"
    bits = round(1e6 * mbits)
    queue = max(_LEAST_QUEUE, int(bits / 8 * _QUEUE_SECONDS))
    bucket = ["rate", f"{bits}bit", "burst", str(burst(mbits)), "limit", str(queue)]
    return [
        [ip, "address", "add", address, "dev", INTERFACE],
        [ip, "link", "set", "dev", INTERFACE, "up"],
        [tc, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *bucket],
    ]


def _program(name: str) -> str:
    program = shutil.which(name) or shutil.which(name, path=_PATH)
    if program is None:
        raise LinkError(f"there is no program {name}, which iproute2 has")
    return program


def _new_namespace() -> int:
    _call("unshare", _CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _in_namespace(path: str, commands: Sequence[Sequence[str]]) -> None:
    def work() -> None:
        _set_namespace(path)
        for command in commands:
            _run(command)  # a child starts in the namespace of the thread that starts it

    _in_thread(work)


def _set_namespace(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise LinkError(f"the namespace {path} cannot be opened: {error.strerror}") from error
    try:
        _call("setns", descriptor, _CLONE_NEWNET)
    finally:
        os.close(descriptor)


def _run(command: Sequence[str]) -> None:
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LinkError(f"{shown!r} failed: {error}") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}"
        raise LinkError(f"{shown!r} failed: {said}")


def _call(name: str, *arguments: int) -> None:
    """Call a function of libc that ``os`` has from Python 3.12 on only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        said = os.strerror(ctypes.get_errno())
        raise LinkError(
            f"{name} of a network namespace: {said} (it takes root, or the capabilities "
            "CAP_SYS_ADMIN and CAP_NET_ADMIN)"
        )


def _in_thread(work: Callable[[], _T]) -> _T:
    """In a thread that then ends, so that this one stays in its namespace whatever is raised."""
    with ThreadPoolExecutor(1) as one:
        return one.submit(work).result()
