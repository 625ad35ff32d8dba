"""``megatron-muon doctor``: whether Muon would run here, on what, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.doctor.rows import examine
from megatron_muon.lab.outputs import add_outputs, parsed, parser_of, write_json
from megatron_muon.lab.tables import listed, print_lines, show

_DESCRIPTION = """\
Print what a run with --optimizer muon would find here: versions, the hooks in
Megatron, which Adam updates what is not Muon's, which options are refused, GPU
or CPU. Megatron is imported as a run would import it; nothing is built and no
process group is made.

Exit status: 0, Muon would run; 1, it would not: the last lines say why; 2,
wrong arguments."""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status, as ``--help`` lists them."""
    parser = parser_of("megatron-muon doctor", _DESCRIPTION)
    text = (
        "Megatron-LM's folder with pretrain_gpt.py (default: the Megatron that "
        "Python finds)"
    )
    parser.add_argument("checkout", metavar="CHECKOUT", nargs="?", type=Path, help=text)
    add_outputs(parser)
    args = parsed(parser, argv)
    checkout: Path | None = args.checkout
    if checkout is not None:
        if not (checkout / "megatron" / "training").is_dir():
            way = "give the folder with pretrain_gpt.py"
            parser.error(f"{checkout} is no Megatron-LM checkout: {way}")
        checkout = checkout.resolve()
    rows = examine(checkout)
    faults = [row.fault for row in rows if row.fault]
    verdict = [f"Muon would not run: {fault}" for fault in faults]
    values = {row.name: row.value for row in rows}
    print_lines(listed(list(values.items())))
    show("", *verdict or ["Muon would run."])
    write_json(args.json, {"runs": not faults, "faults": faults, **values})
    return 1 if faults else 0
