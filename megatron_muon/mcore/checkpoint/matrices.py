"""The matrices that Muon has in a run, as a checkpoint's record names them.

Names and sizes do not depend on the model's parallelism. All experts of a layer have
one name, since another class may hold them in one weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_muon.settings.config import ROWS, named

if TYPE_CHECKING:
    from megatron_muon.mcore.routing.routes import Route

Matrices = dict[str, int]  # how many, by "ROWS x COLS"
Table = dict[str, Matrices]  # by weight
Record = Mapping[str, Any]

# The names of one weight in different classes that torch_dist loads into one another:
# three of experts, and Transformer Engine's fused MLP.
_SAME = (
    (re.compile(r"\.experts\.local_experts\.\d+\."), ".experts."),
    (re.compile(r"(\.experts\.linear_fc[12]\.weight)\d+$"), r"\1"),
    (re.compile(r"\.experts\.weight([12])$"), r".experts.linear_fc\1.weight"),
    (re.compile(r"\.mlp\.1\.basic_ops\.0\."), ".mlp.linear_fc1."),
    (re.compile(r"\.mlp\.3\.basic_ops\.0\."), ".mlp.linear_fc2."),
)
_ROUTING = ("muon_include", "muon_exclude")
_PADDED = re.compile(r"(^|\.)(word_embeddings|output_layer)\.weight$")  # for TP


def matrices_of_routes(routes: Sequence[Route], ep_size: int) -> Table:
    """The matrices of a pipeline stage, by the routes of one of its ranks."""
    table: Table = {}
    for route in routes:
        likes = ep_size if route.weight.is_expert else 1
        for matrix in () if route.muon is None else route.muon.matrices:
            add_matrices(table, route.weight.name, matrix.unit, likes * matrix.units)
    return table


def add_matrices(table: Table, name: str, shape: tuple[int, int], count: int) -> None:
    """Add matrices of one shape, (rows, cols), of a weight to a table."""
    for pattern, text in _SAME:
        name = pattern.sub(text, name)
    of_weight = table.setdefault(name, {})
    size = f"{shape[0]} x {shape[1]}"
    of_weight[size] = of_weight.get(size, 0) + count


def require_record(record: Any) -> None:
    """Raise a ValueError where a record from a file has values of other types."""
    settings = record.get("settings") if isinstance(record, Mapping) else None
    table = None if settings is None else record.get("matrices") or {}
    if not isinstance(settings, Mapping) or not isinstance(table, Mapping):
        raise ValueError("the record of Muon's settings is damaged")
    for name in settings:
        patterns = settings[name] if name in _ROUTING else ()
        if not isinstance(name, str) or not isinstance(patterns, (list, tuple)):
            raise ValueError(f"the record of Muon's setting {name!r} is damaged")
    for name, matrices in table.items():
        try:
            elements(matrices)
        except (AttributeError, TypeError, ValueError):
            raise ValueError(
                f"the record of Muon's matrices in {name} is damaged"
            ) from None


def require_same_matrices(saved: Record, own: Record, where: str) -> None:
    """Raise a ValueError where Muon had other elements in the checkpoint than it has in
    this run. It may have split them into other matrices. A record of 0.2.0 has none.
    """
    then = saved.get("matrices")
    now = own["matrices"]
    if then is None or now is None:
        return
    changed = [
        name
        for name in sorted(then.keys() | now.keys())
        if elements(then.get(name, {})) != elements(now.get(name, {}))
        and not (name in then and name in now and _PADDED.search(name))
    ]
    if not changed:
        return
    first = changed[0]
    before = in_words(then.get(first, {}))
    after = in_words(now.get(first, {}))
    more = f" ({len(changed) - 1} more differ)" if len(changed) > 1 else ""
    of_save: list[str] = []
    for field in _ROUTING:
        option = ROWS[field].flags[0].option
        patterns = saved["settings"].get(field, ())
        of_save += [f"{option} '{pattern}'" for pattern in patterns]
    raise ValueError(
        f"{where} was saved by a different model, or with another routing: Muon had "
        f"{before} in {first} and has {after} in this run{more}. Give the model's "
        f"settings, {named('muon_include')} and {named('muon_exclude')} as at the "
        f"save, which had {' '.join(of_save) or 'neither'}. To go on with another "
        "routing, load it with --optimizer adam --adamw-from-muon, save, and load that "
        "with --muon-from-adamw momentum (docs/routing.md has the commands), or load "
        "the model alone (--no-load-optim)"
    )


def elements(matrices: Matrices) -> int:
    """The number of elements in a weight's matrices."""
    total = 0
    for size, count in matrices.items():
        rows, cols = size.split(" x ")
        total += int(rows) * int(cols) * int(count)
    return total


def in_words(matrices: Matrices) -> str:
    """The matrices of a weight, as ``2 of 128 x 512``."""
    return ", ".join(f"{n} of {size}" for size, n in matrices.items()) or "nothing"
