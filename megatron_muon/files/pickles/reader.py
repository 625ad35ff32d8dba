"""A reader of pickles as data: no byte of a pickle chooses code that runs.

Python's unpickler imports what a pickle names and calls it. This reader imports nothing. A name
becomes a ``Name``, an object of a class becomes an ``Unknown`` with its arguments and its state.
Only the makers that the caller passes are called, and each checks its arguments. The opcodes are
those that torch and Megatron write in protocols 2 to 5: no LONG4, no EXT and no out-of-band buffer.

Python's unpickler also fails in ways that no caller can catch. A nested tuple as a key overflows
the C stack, and one opcode makes it allocate 64 GB. Here keys are checked and the memo is a dict.

Source: the comments on opcodes in CPython's ``pickletools``.
"""

from __future__ import annotations

import struct
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from megatron_muon.files.pickles.makers import PLAIN, Makers
from megatron_muon.files.pickles.objects import Name, PickleError, Unknown, checked_key

MOST_BYTES = 1 << 31  # of one pickle; a large run's .metadata has some 10**8
_STATELESS = (bool, bytes, float, frozenset, int, list, set, str, tuple, type(None))
_BUILTINS = {"__builtin__": "builtins"}  # the name in protocol 2


def load(
    data: bytes,
    makers: Makers = PLAIN,
    values: Mapping[tuple[str, str], Any] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The object that a pickle holds.

    Args:
        data: the pickle; bytes after its end are ignored.
        makers: functions by module and name of a class or function; they are called with its
            arguments, must check them, and raise ``ValueError`` or ``TypeError``.
        values: by module and name, objects that are neither classes nor functions, such as dtypes.
        persistent: makes an object of a persistent id; None refuses such ids.

    Raises:
        PickleError: the pickle is damaged, or has something that is not read here; says what and
            where.
    """
    if len(data) > MOST_BYTES:
        raise PickleError(f"a pickle of {len(data)} bytes, more than {MOST_BYTES}")
    return _Machine(data, makers, values or {}, persistent).run()


class _Stop(Exception):
    """The end of a pickle."""


class _Machine:
    """A stack machine for one pickle."""

    def __init__(
        self,
        data: bytes,
        makers: Makers,
        values: Mapping[tuple[str, str], Any],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self._data, self._at = data, 0
        self._makers, self._values, self._persistent = makers, values, persistent
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks below each mark
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, steps, end = self._data, _STEPS, len(self._data)
        start = 0
        try:
            while True:
                start = self._at
                if start >= end:
                    raise PickleError("it ends too early")
                self._at = start + 1
                step = steps[data[start]]
                if step is None:
                    raise PickleError(f"opcode {data[start : start + 1]!r} is not read here")
                step(self)
        except _Stop:
            if len(self._stack) == 1 and not self._below:
                return self._stack[0]
            raise PickleError("it is damaged: objects are left over at its end") from None
        except PickleError as error:
            raise PickleError(f"pickle, at byte {start}: {error}") from None
        except IndexError:
            why = "it ends too early" if self._at >= end else "an object is missing"
            raise PickleError(f"pickle, at byte {start}: {why}") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise PickleError(f"pickle, at byte {start}: {error}") from None

    # --- bytes --------------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        start, stop = self._at, self._at + count
        if stop > len(self._data):
            raise PickleError("it ends too early")
        self._at = stop
        return self._data[start:stop]

    def _number(self, size: int) -> int:
        if size > 1:
            return int.from_bytes(self._take(size), "little")
        number = self._data[self._at]  # IndexError where it ends
        self._at += 1
        return number

    def _line(self) -> str:
        stop = self._data.find(b"\n", self._at)
        if stop < 0:
            raise PickleError("it ends too early")
        start, self._at = self._at, stop + 1
        return self._data[start:stop].decode()

    # --- the stack ------------------------------------------------------------------------------

    def _marked(self) -> list[Any]:
        """Take the objects above the last mark, and the mark."""
        items, self._stack = self._stack, self._below.pop()
        return items

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def pop(self) -> None:
        if self._stack:
            del self._stack[-1]
        else:
            self._stack = self._below.pop()

    def pop_mark(self) -> None:
        self._marked()

    def stop(self) -> None:
        raise _Stop

    def proto(self) -> None:
        version = self._number(1)
        if not 2 <= version <= 5:
            raise PickleError(f"of protocol {version}, 2 to 5 are read")

    def frame(self) -> None:
        if self._number(8) > len(self._data) - self._at:
            raise PickleError("it ends too early")

    # --- memo -----------------------------------------------------------------------------------

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _put(self, size: int) -> None:
        self._memo[self._number(size)] = self._stack[-1]

    def _get(self, size: int) -> None:
        number = self._number(size)
        if number not in self._memo:
            raise PickleError(f"it refers to object {number}, which is not there")
        self._stack.append(self._memo[number])

    # --- scalars --------------------------------------------------------------------------------

    def long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._number(1)), "little", signed=True))

    def signed(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def real(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _text(self, size: int) -> None:
        self._stack.append(self._take(self._number(size)).decode(errors="surrogatepass"))

    # --- containers -----------------------------------------------------------------------------

    def few(self, count: int) -> None:
        items = self._stack[-count:]
        if len(items) < count:
            raise IndexError
        self._stack[-count:] = [tuple(items)]

    def put_tuple(self) -> None:
        items = tuple(self._marked())
        self._stack.append(items)

    def put_list(self) -> None:
        items = self._marked()
        self._stack.append(items)

    def put_dict(self) -> None:
        items = self._marked()
        self._stack.append({})
        self._set(items)

    def put_frozenset(self) -> None:
        items = frozenset([checked_key(item) for item in self._marked()])
        self._stack.append(items)

    def append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def appends(self) -> None:
        self._extend(self._marked())

    def _extend(self, items: Any) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(items)
        elif not isinstance(target, Unknown):
            raise PickleError(f"items are put into a {type(target).__name__}")

    def setitem(self) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        self._set([key, value])

    def setitems(self) -> None:
        self._set(self._marked())

    def _set(self, items: Any) -> None:
        target = self._stack[-1]
        if len(items) % 2:
            raise PickleError("a key has no value")
        if type(target) is dict:
            for key in items[::2]:
                if type(key) is not str:
                    checked_key(key)
            target.update(zip(items[::2], items[1::2], strict=True))
        elif not isinstance(target, Unknown):
            raise PickleError(f"values are put into a {type(target).__name__}")

    def additems(self) -> None:
        items = self._marked()
        target = self._stack[-1]
        if type(target) is not set:
            raise PickleError(f"elements are put into a {type(target).__name__}")
        target.update([checked_key(item) for item in items])

    # --- objects --------------------------------------------------------------------------------

    def name_line(self) -> None:
        module = self._line()
        self._stack.append(self._named(module, self._line()))

    def stack_global(self) -> None:
        name = self._stack.pop()
        module = self._stack.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("a name is no text")
        self._stack.append(self._named(module, name))

    def _named(self, module: str, name: str) -> Any:
        named = Name(_BUILTINS.get(module, module), name)
        return self._values.get(named, named)

    def reduce(self) -> None:
        args = self._stack.pop()
        made = self._stack.pop()
        self._make(made, args)

    def newobj(self) -> None:
        self.reduce()

    def newobj_ex(self) -> None:
        keywords, args, made = self._stack.pop(), self._stack.pop(), self._stack.pop()
        if keywords and isinstance(made, Name) and made in self._makers:
            raise PickleError(f"{made} is called with keywords, which is not read here")
        self._make(made, args)

    def _make(self, made: Any, args: Any) -> None:
        if not isinstance(args, tuple) or not isinstance(made, (Name, Unknown)):
            raise PickleError(f"a {type(made).__name__} is called")
        if isinstance(made, Unknown):  # what an unknown function returned
            self._stack.append(Unknown(made.name, args))
            return
        maker = self._makers.get(made)
        self._stack.append(Unknown(made, args) if maker is None else maker(*args))

    def build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, Unknown):
            target.state = state
        elif isinstance(target, Namespace):
            if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
                raise PickleError("a Namespace's attributes are no dict by name")
            vars(target).update(state)
        elif isinstance(target, Name) or type(target) in _STATELESS:
            raise PickleError(f"a {type(target).__name__} is given a state")
        # Else it is a dict or a tensor, whose attributes are not read.

    def persid(self) -> None:
        if self._persistent is None:
            raise PickleError("it refers to an object outside of it")
        self._stack.append(self._persistent(self._stack.pop()))


def _push(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine._stack.append(make())


def _push_number(size: int) -> Callable[[_Machine], None]:
    return lambda machine: machine._stack.append(machine._number(size))


def _push_bytes(size: int, make: Callable[[bytes], Any] = bytes) -> Callable[[_Machine], None]:
    return lambda machine: machine._stack.append(make(machine._take(machine._number(size))))


def _sized(method: Callable[[_Machine, int], None], size: int) -> Callable[[_Machine], None]:
    return lambda machine: method(machine, size)


_BY_OPCODE: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _Machine.proto,
    b"\x95": _Machine.frame,
    b".": _Machine.stop,
    b"(": _Machine.mark,
    b"0": _Machine.pop,
    b"1": _Machine.pop_mark,
    b"\x94": _Machine.memoize,
    b"q": _sized(_Machine._put, 1),
    b"r": _sized(_Machine._put, 4),
    b"h": _sized(_Machine._get, 1),
    b"j": _sized(_Machine._get, 4),
    b"N": _push(lambda: None),
    b"\x88": _push(lambda: True),
    b"\x89": _push(lambda: False),
    b"K": _push_number(1),
    b"M": _push_number(2),
    b"J": _Machine.signed,
    b"\x8a": _Machine.long,
    b"G": _Machine.real,
    b"X": _sized(_Machine._text, 4),
    b"\x8c": _sized(_Machine._text, 1),
    b"\x8d": _sized(_Machine._text, 8),
    b"B": _push_bytes(4),
    b"C": _push_bytes(1),
    b"\x8e": _push_bytes(8),
    b"\x96": _push_bytes(8, bytearray),
    b")": _push(tuple),
    b"]": _push(list),
    b"}": _push(dict),
    b"\x8f": _push(set),
    b"\x85": _sized(_Machine.few, 1),
    b"\x86": _sized(_Machine.few, 2),
    b"\x87": _sized(_Machine.few, 3),
    b"t": _Machine.put_tuple,
    b"l": _Machine.put_list,
    b"d": _Machine.put_dict,
    b"\x91": _Machine.put_frozenset,
    b"a": _Machine.append,
    b"e": _Machine.appends,
    b"s": _Machine.setitem,
    b"u": _Machine.setitems,
    b"\x90": _Machine.additems,
    b"c": _Machine.name_line,
    b"\x93": _Machine.stack_global,
    b"R": _Machine.reduce,
    b"\x81": _Machine.newobj,
    b"\x92": _Machine.newobj_ex,
    b"b": _Machine.build,
    b"Q": _Machine.persid,
}
_STEPS = [_BY_OPCODE.get(bytes([code])) for code in range(256)]
