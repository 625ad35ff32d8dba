"""Put what the ranks hold together again into whole (TP 1) tensors, and compare them.

Needs torch only: it runs in the test's process, which imports no Megatron.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
Whole = dict[str, dict[str, Tensor]]  # kind ("params", "main", "exp_avg", …) → TP 1 name → tensor


def whole(results: list[dict[str, Any]]) -> Whole:
    """Put the ranks' results together, in TP 1 coordinates.

    Raises:
        AssertionError: shards that overlap or leave a hole, or replicas that differ.
    """
    ranks = {result["rank"]: result for result in results}
    assert len(ranks) == len(results)
    tp_size, pp_size, dp_size = (max(rank[i] for rank in ranks) + 1 for i in range(3))
    out: Whole = {"params": {}}
    for pp_rank in range(pp_size):
        for name, split in ranks[0, pp_rank, 0]["splits"].items():
            column = [
                _one_tp_rank([ranks[t, pp_rank, d] for d in range(dp_size)], name)
                for t in range(tp_size)
            ]
            for kind in column[0]:
                full = join([part[kind] for part in column], split)
                seen = out.setdefault(kind, {}).setdefault(name, full)
                assert torch.equal(seen, full), f"{kind} of the tied {name} differs over stages"
    return out


def _one_tp_rank(replicas: list[dict[str, Any]], name: str) -> dict[str, Tensor]:
    """All kinds of one parameter on one TP rank, put together over its DP ranks."""
    params = [torch.from_numpy(replica["params"][name]) for replica in replicas]
    assert all(torch.equal(param, params[0]) for param in params), f"{name} differs over DP"
    found = {"params": params[0]}
    shards = sorted(
        (r["shards"][name] for r in replicas if name in r["shards"]), key=lambda s: s[0]
    )
    if not shards:
        return found  # frozen
    edges = [0, *(end for _, end, _ in shards)]
    assert [start for start, _, _ in shards] == edges[:-1], f"shards of {name} overlap or miss"
    assert edges[-1] == params[0].numel(), f"shards of {name} end at {edges[-1]}"
    for kind in shards[0][2]:
        flat = torch.cat([torch.from_numpy(arrays[kind]) for _, _, arrays in shards])
        found[kind] = flat.view(params[0].shape)
    return found


def cut(full: Tensor, split: str, tp_rank: int, tp_size: int) -> Tensor:
    """The part of ``full`` that a TP rank holds; ``split`` is one of "", "0", "1", "gated".

    A gated fc1 holds gate rows and up rows: rank r has [gate_r; up_r] (megatron/core/transformer/
    mlp.py, glu), so its rows are not one range of the whole tensor.
    """
    if split == "":
        return full
    if split == "gated":
        return torch.cat([half.chunk(tp_size)[tp_rank] for half in full.chunk(2)])
    return full.chunk(tp_size, dim=int(split))[tp_rank]


def join(parts: list[Tensor], split: str) -> Tensor:
    """The reverse of ``cut``; replicas must be equal."""
    if split == "":
        assert all(torch.equal(part, parts[0]) for part in parts), "replicas differ"
        return parts[0]
    if split == "gated":
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[i] for i in (0, 1) for half in halves])
    return torch.cat(parts, dim=int(split))


def differences(one: Whole, other: Whole) -> list[str]:
    """Kinds and names that are not bitwise equal; empty when all is."""
    assert one.keys() == other.keys(), (one.keys(), other.keys())
    found = []
    for kind, tensors in one.items():
        assert tensors.keys() == other[kind].keys()
        found += [f"{kind} {n}" for n, t in tensors.items() if not torch.equal(t, other[kind][n])]
    return found
