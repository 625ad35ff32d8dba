"""Makers of plain objects: each checks the arguments that a pickle calls it with."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from megatron_muon.files.pickles.objects import Name, PickleError, checked_key

Maker = Callable[..., Any]
Makers = Mapping[tuple[str, str], Maker]


def _plain(make: Callable[[Any], Any]) -> Maker:
    """A maker of a container from the items of another one, which the pickle has already."""

    def maker(items: Any = ()) -> Any:
        if not isinstance(items, (list, tuple, set, frozenset, bytes)):
            raise PickleError(f"a container is made of {type(items).__name__}")
        return make(items)

    return maker


def _hashed(make: Callable[[Any], Any]) -> Maker:
    return _plain(lambda items: make([checked_key(item) for item in items]))


def _dict(*args: Any) -> dict[Any, Any]:
    """An empty dict, also for OrderedDict and defaultdict; their items follow one by one."""
    if args and not isinstance(args[0], (Name, type(None))):
        raise PickleError("a dict is made of an object")
    return {}


def _bytearray(data: Any = b"", encoding: str = "") -> bytearray:
    if isinstance(data, str) and encoding == "latin-1":  # protocol 2
        return bytearray(data, "latin-1")
    if not isinstance(data, bytes):
        raise PickleError(f"a bytearray is made of {type(data).__name__}")
    return bytearray(data)


def _encoded(text: Any, encoding: Any) -> bytes:
    """Bytes in protocol 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise PickleError("bytes are made of what is no text in latin1")
    return text.encode("latin1")


def _complex(real: Any, imaginary: Any) -> complex:
    if not isinstance(real, float) or not isinstance(imaginary, float):
        raise PickleError("a complex number is made of what is no number")
    return complex(real, imaginary)


def _namespace() -> Namespace:
    return Namespace()


PLAIN: Makers = {
    ("argparse", "Namespace"): _namespace,
    ("collections", "OrderedDict"): _dict,
    ("collections", "defaultdict"): _dict,
    ("builtins", "dict"): _dict,
    ("builtins", "list"): _plain(list),
    ("builtins", "set"): _hashed(set),
    ("builtins", "frozenset"): _hashed(frozenset),
    ("builtins", "bytes"): _plain(bytes),  # empty ones, in protocol 2
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "complex"): _complex,
    ("_codecs", "encode"): _encoded,
}
