"""``--nodes``: that a launcher's world has as many, and how one with as many is started."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from megatron_muon.lab.compare.topology import Topology

_BATCH_FILE = "examples/evidence/compare.sbatch"
_GPUS = 8  # of a node, where none is here and no topology says so
_AGENTS, _WORLD, _LOCAL = "GROUP_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
_SLURM = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")


def require_nodes(asked: int, environment: Mapping[str, str]) -> None:
    """Check that a launcher has started ranks on as many nodes as were asked for.

    It reads variables only, so it is done before any rank waits for another.

    Args:
        asked: ``--nodes``.
        environment: of a rank.

    Raises:
        ValueError: there are more or fewer, or the launcher does not say.
    """
    nodes, said_by = _nodes(environment)
    if nodes != asked:
        raise ValueError(
            f"--nodes {asked}, and the launcher has started ranks on {nodes} "
            f"node{'s' * (nodes != 1)} ({said_by}): start torchrun with --nnodes {asked} or "
            f"sbatch with --nodes {asked}, or give --nodes {nodes}"
        )


def _nodes(environment: Mapping[str, str]) -> tuple[int, str]:
    """The number of nodes, and the variables that say so."""
    if environment.get(_AGENTS, "").isdecimal():  # torchrun has one agent on each node
        return int(environment[_AGENTS]), f"{_AGENTS}={environment[_AGENTS]}"
    world, local = environment.get(_WORLD, ""), environment.get(_LOCAL, "")
    if world.isdecimal() and local.isdecimal() and int(local):
        return -(-int(world) // int(local)), f"{_WORLD}={world}, {_LOCAL}={local}"
    for name in _SLURM:
        if environment.get(name, "").isdecimal():
            return int(environment[name]), f"{name}={environment[name]}"
    raise ValueError(
        "--nodes cannot be checked: the launcher sets none of "
        f"{', '.join((_AGENTS, _LOCAL, *_SLURM))}; leave --nodes out, or set {_LOCAL} to the ranks "
        "of a node"
    )


def how_to_start(
    nodes: int,
    topologies: Sequence[Topology],
    words: Sequence[str],
    folder: str,
    batch: tuple[int, int],
    gpus: int,
) -> str:
    """The commands that start a comparison on several nodes.

    Args:
        nodes: ``--nodes``.
        topologies: those that were asked for; empty for those that fit the GPUs.
        words: the command's arguments.
        folder: ``--folder``.
        batch: ``--micro-batch-size`` and ``--global-batch-size``.
        gpus: of this machine.

    Raises:
        ValueError: no topology has as many ranks on each node.
    """
    each, why = _ranks_of_a_node(nodes, topologies, gpus)
    kept = without(words, ("--nodes", "--folder", "--topologies"))
    wanted = topologies or fitting(nodes, each)
    micro, whole = batch
    if any(whole % (micro * one.dp) for one in wanted if one.world == nodes * each):
        kept = [
            *without(kept, ("--global-batch-size",)),
            f"--global-batch-size={micro * nodes * each}",
        ]
    names = [str(one) for one in wanted]
    torchrun = [
        *("torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(each)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST_NODE:29400"),
        *("-m", "megatron_muon", "compare", "--nodes", str(nodes)),
        *("--folder", folder, "--topologies", *names, *kept),
    ]
    variables = [f"FOLDER={shlex.quote(folder)}", f"TOPOLOGIES={shlex.quote(' '.join(names))}"]
    sbatch = ["sbatch", "--nodes", str(nodes)]
    if each != _GPUS:
        variables.append(f"GPUS_PER_NODE={each}")
        sbatch += ["--gpus-per-node", str(each)]
    sbatch += [_BATCH_FILE, *kept]
    return (
        f"--nodes {nodes} takes a launcher, and this process was started by none. With {each} "
        f"rank{'s' * (each != 1)} a node ({why}), start on every node, with the first one's name:\n"
        f"  {shlex.join(torchrun)}\n"
        f"or under Slurm, from the root of a clone (its model is larger: see the file):\n"
        f"  {' '.join(variables)} {shlex.join(sbatch)}"
    )


def _ranks_of_a_node(nodes: int, topologies: Sequence[Topology], gpus: int) -> tuple[int, str]:
    """The number, and what says so."""
    if not topologies:
        return (gpus, "as many as GPUs here") if gpus else (_GPUS, "no GPU is here to count")
    even = [one for one in topologies if one.world % nodes == 0]
    if not even:
        raise ValueError(
            f"--nodes {nodes}: no topology of {', '.join(map(str, topologies))} has the same "
            f"number of ranks on each node; give one of a multiple of {nodes} ranks"
        )
    largest = max(even, key=lambda one: one.world)
    return largest.world // nodes, f"for {largest}"


def fitting(nodes: int, each: int) -> list[Topology]:
    """Topologies of ``nodes`` × ``each`` ranks, as ``compare.sbatch`` takes them."""
    ranks = nodes * each
    topologies = [Topology(dp=ranks), Topology(tp=each, dp=nodes)]
    if ranks % 2 == 0:
        topologies.append(Topology(tp=2, dp=ranks // 2))
    if ranks % 4 == 0:
        topologies.append(Topology(tp=2, pp=2, dp=ranks // 4))
    return list(dict.fromkeys(topologies))


def without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Arguments without some flags and their values."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in flags
        if not dropping:
            kept.append(word)
    return kept
