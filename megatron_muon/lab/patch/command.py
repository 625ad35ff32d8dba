"""``megatron-muon patch``: ``--optimizer muon`` in a Megatron-LM checkout, without the launcher."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.patch import tree as patch_tree
from megatron_muon.lab.patch.lines import PatchError
from megatron_muon.lab.patch.tree import Checkout

NOT_PATCHED = 3
_WAY_OUT = "; or leave the checkout as it is and use torchrun -m megatron_muon SCRIPT"

_DESCRIPTION = """\
Let plain `torchrun pretrain_gpt.py --optimizer muon` of a Megatron-LM checkout find megatron_muon:
six lines at the end of megatron/training/__init__.py import it where it is installed. All other
bytes of the checkout stay, your own edits too, and `revert` takes out exactly those lines. The
launcher, `torchrun -m megatron_muon pretrain_gpt.py`, does the same with no patch."""

_STATUS = f"""\
exit status:
  0  check: the checkout is patched; apply, revert: it is as asked for, also where it was before
  1  the patch cannot go in, or cannot come out: stderr says why, nothing is changed
  2  wrong arguments
  {NOT_PATCHED}  check: not patched, but it can be"""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        The exit status, as ``--help`` lists them; wrong arguments end the process with 2.
    """
    given = _parser().parse_args(argv)
    checkout: Path = given.path
    try:
        if given.action == "check":
            return _check(checkout, given.any_version)
        if given.action == "apply":
            done = patch_tree.apply(checkout, any_version=given.any_version)
        else:
            done = patch_tree.revert(checkout)
    except BrokenPipeError:
        raise  # the reader of the output is gone, which is no fault of the checkout
    except (PatchError, OSError) as error:
        way_out = isinstance(error, PatchError) and given.action != "revert"
        text = f"{error}{_WAY_OUT if way_out else ''}"
        print(f"megatron-muon patch {given.action}: error: {text}", file=sys.stderr)
        return 1
    file = checkout / patch_tree.manifest().patch.file
    past = {"apply": ("patched", "already patched"), "revert": ("reverted", "not patched")}
    print(f"{past[given.action][0]} {file}" if done else f"{past[given.action][1]}: nothing to do")
    return 0


def _check(checkout: Path, any_version: bool) -> int:
    looked_at = patch_tree.look(checkout, any_version=any_version)
    print(f"{looked_at.state}: {describe(looked_at)}")
    return 0 if looked_at.state == "patched" else NOT_PATCHED


def describe(checkout: Checkout) -> str:
    """The checkout's version in words, and whether the user has edited the patched file."""
    release = " or ".join(checkout.releases) or "no release that the patch was tried on"
    own = ", with your own edits in the file" if checkout.edited and checkout.releases else ""
    return f"megatron-core {checkout.version} ({release}){own}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-muon patch",
        description=_DESCRIPTION,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["check", "apply", "revert"])
    parser.add_argument(
        "path", metavar="PATH", type=Path, help="the folder that pretrain_gpt.py is in"
    )
    parser.add_argument(
        "--any-version",
        action="store_true",
        help="also a version that is not in patches/manifest.json, if the place in the file is "
        "the same",
    )
    return parser
