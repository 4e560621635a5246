"""Read a pickle as data: opcode by opcode, with a reader that calls only functions of an allow-list.

The table lists every import that a pickle may request; for any other, ``UnsafeContent`` names it. Objects of classes
become ``UnpickledObject``, which is inert. Opcodes: Python's ``pickletools``; protocols 2 to 5. Time and memory are
linear in the input.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from relight.errors import UnsafeContent

LONG_BYTES_MAX = 4096
EQUAL_HASHES_MAX = 64
LEVELS_MAX = 200
KEY_VALUES_MAX = 1000
"""Most values of a key or a set's member. A value counts each time that hashing it meets it: a tuple may contain one tuple often."""
OBJECTS_MAX = 4_000_000
"""Containers and memo entries, plus one for every 16 bytes: a byte of a pickle may request a hundred bytes of memory."""
STACK_MAX = 1 << 20
"""Values on the stack. Lists and dicts are written a thousand entries at a time."""
_STANDARD = frozenset(sys.stdlib_module_names) | {"__builtin__", "exceptions", "copy_reg", "nt", "posix", "__main__"}


class AllowedClass(NamedTuple):
    """A class that may be named. Objects of it become ``UnpickledObject``."""

    name: str


class Stranger(NamedTuple):
    """An unknown class. Its objects become ``UnpickledObject``, named ``STRANGE`` followed by the class's name."""

    name: str


STRANGE = "?"
"""Prefix of the names of unknown classes' objects."""


class AllowedCall(NamedTuple):
    """A call that is allowed: a function of this package, which receives the arguments. ``hashes``: it makes a set or a dict of them."""

    function: Callable[..., Any]
    hashes: bool = False


class UnpickledObject:
    """A pickled object: its class's name, constructor arguments, and state."""

    __slots__ = ("args", "items", "name", "pairs", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args, self.state = name, args, None
        self.items: list[Any] = []
        self.pairs: dict[Any, Any] = {}

    def __getitem__(self, key: str) -> Any:
        """Return an attribute of its state. Raise ``KeyError`` if it has none of that name."""
        if not isinstance(self.state, dict):
            raise KeyError(key)
        return self.state[key]

    state: Any


_MARK = object()
_HASHED = (int, float, complex, tuple, frozenset)
_VALUES: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
_NUMBERS = {
    ord("J"): struct.Struct("<i"),
    ord("K"): struct.Struct("<B"),
    ord("M"): struct.Struct("<H"),
    ord("G"): struct.Struct(">d"),
}
_U1, _U4, _U8 = struct.Struct("<B"), struct.Struct("<I"), struct.Struct("<Q")
_TEXTS = {ord("X"): _U4, 0x8C: _U1, 0x8D: _U8}
_BYTES = {ord("B"): _U4, ord("C"): _U1, 0x8E: _U8, ord("T"): _U4, ord("U"): _U1, 0x96: _U8}
_EMPTY: dict[int, Callable[[], Any]] = {ord("]"): list, ord(")"): tuple, ord("}"): dict, 0x8F: set}
_PUTS = {ord("q"): _U1, ord("r"): _U4}
_GETS = {ord("h"): _U1, ord("j"): _U4}


def read_pickle(
    data: bytes,
    table: Mapping[str, Any],
    where: str,
    persistent: Callable[[Any], Any] | None = None,
    *,
    strangers: bool = False,
) -> Any:
    """Return the value in ``data``.

    ``table``: by ``module.name`` an ``AllowedClass``, an ``AllowedCall``, or a value. ``persistent`` resolves
    persistent ids, such as storages. ``strangers``: classes that are neither in the table nor in Python's library
    become ``Stranger``, and their objects ``UnpickledObject``, so that the rest can be read. Unknown functions are
    refused in both cases.
    """
    return read_first(data, table, where, persistent, strangers=strangers)[0]


def read_first(
    data: bytes,
    table: Mapping[str, Any],
    where: str,
    persistent: Callable[[Any], Any] | None = None,
    *,
    strangers: bool = False,
) -> tuple[Any, int]:
    """Return the first of several concatenated pickles, and the offset of its end."""
    try:
        machine = _Machine(data, table, where, persistent, strangers)
        return machine.run(), machine.at
    except UnsafeContent:
        raise
    except (
        struct.error,
        IndexError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise UnsafeContent(
            f"not a pickle that can be read: {type(error).__name__}: {str(error)[:100]}", where=where
        ) from None


class _Machine:
    def __init__(
        self,
        data: bytes,
        table: Mapping[str, Any],
        where: str,
        persistent: Callable[[Any], Any] | None,
        strangers: bool,
    ) -> None:
        self._data, self._table, self._where, self._persistent, self._strangers = (
            data,
            table,
            where,
            persistent,
            strangers,
        )
        self._nested: dict[int, tuple[Any, int, int]] = {}
        """By its address, each tuple or frozenset with others in it: the object, its levels, and the values that hashing it meets."""
        self._left = OBJECTS_MAX + len(data) // 16
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._hashes: dict[int, tuple[Any, Counter[int]]] = {}

    @property
    def at(self) -> int:
        """Number of bytes read."""
        return self._at

    def run(self) -> Any:
        """Return the value with which the pickle ends."""
        stack, memo = self._stack, self._memo
        while True:
            code = self._data[self._at]
            self._at += 1
            if len(stack) > STACK_MAX:
                raise self._unsafe(f"more than {STACK_MAX} values that wait to become part of another")
            if code == ord("."):
                if len(stack) != 1:
                    raise self._unsafe("it ends with more than one value")
                return stack[0]
            if code in _TEXTS:
                stack.append(str(self._take(self._number(_TEXTS[code])), "utf-8", "surrogatepass"))
            elif code in _GETS:
                stack.append(memo[self._number(_GETS[code])])
            elif code in _PUTS:
                self._count()
                memo[self._number(_PUTS[code])] = stack[-1]
            elif code == 0x94:
                self._count()
                memo[len(memo)] = stack[-1]
            elif code in _NUMBERS:
                stack.append(self._number(_NUMBERS[code]))
            elif code in _VALUES:
                stack.append(_VALUES[code])
            elif code in _EMPTY:
                self._count()
                stack.append(_EMPTY[code]())
            elif code == ord("("):
                stack.append(_MARK)
            elif code in _BYTES:
                stack.append(bytes(self._take(self._number(_BYTES[code]))))
            elif code in (0x85, 0x86, 0x87):
                count = code - 0x84
                stack[-count:] = [self._tuple(self._plain(stack[-count:]))]
            elif code == ord("t"):
                stack.append(self._tuple(self._pop_to_mark()))
            elif code in (0x8A, 0x8B):
                length = self._number(_U1 if code == 0x8A else _U4)
                if length > LONG_BYTES_MAX:
                    raise self._unsafe(f"an integer of {length} bytes")
                stack.append(int.from_bytes(self._take(length), "little", signed=True))
            elif code == ord("c"):
                stack.append(self._find(self._line(), self._line()))
            elif code == 0x93:
                name, module = stack.pop(), stack.pop()
                stack.append(self._find(module, name))
            elif code == 0x80:
                self._take(1)
            elif code == 0x95:
                self._take(8)
            else:
                self._change(code)

    def _change(self, code: int) -> None:
        """Execute an opcode that creates or changes values on the stack."""
        stack = self._stack
        if code == ord("a"):
            item = stack.pop()
            self._list().append(item)
        elif code == ord("e"):
            items = self._pop_to_mark()
            self._list().extend(items)
        elif code == ord("s"):
            value, key = stack.pop(), stack.pop()
            self._set(self._dict(), [key, value])
        elif code == ord("u"):
            pairs = self._pop_to_mark()
            self._set(self._dict(), pairs)
        elif code == 0x90:
            items = self._pop_to_mark()
            target = self._top_of_kind(set)
            self._check_keys(target, items)
            target.update(items)
        elif code == 0x91:
            members = self._pop_to_mark()
            self._check_keys(None, members)
            self._tuple(members)
            made_set = frozenset(members)
            self._nested[id(made_set)] = made_set, *self._nesting(members)
            stack.append(made_set)
        elif code == ord("l"):
            stack.append(self._pop_to_mark())
        elif code == ord("d"):
            pairs = self._pop_to_mark()
            mapping: dict[Any, Any] = {}
            self._set(mapping, pairs)
            stack.append(mapping)
        elif code == ord("0"):
            stack.pop()
        elif code == ord("1"):
            self._pop_to_mark()
        elif code == ord("2"):
            stack.append(stack[-1])
        elif code == ord("R"):
            args, function = stack.pop(), stack.pop()
            stack.append(self._call(function, args))
        elif code == 0x81:
            args, kind = stack.pop(), stack.pop()
            stack.append(self._object(kind, args))
        elif code == 0x92:
            words, args, kind = stack.pop(), stack.pop(), stack.pop()
            if not isinstance(words, dict):
                raise self._unsafe("keyword arguments that are not a dict")
            stack.append(self._object(kind, args))
        elif code == ord("b"):
            state, target = stack.pop(), stack[-1]
            if isinstance(target, UnpickledObject):
                target.state = state
            elif not isinstance(target, dict):
                # attributes of an OrderedDict, such as a module's versions, are left out
                raise self._unsafe(f"a state for a {type(target).__name__}")
        elif code == ord("Q") and self._persistent is not None:
            stack.append(self._persistent(stack.pop()))
        else:
            raise self._unsafe(f"opcode {code:#x}, which is not allowed")

    def _object(self, kind: Any, args: Any) -> Any:
        if not isinstance(kind, (AllowedClass, Stranger)) or not isinstance(args, tuple):
            raise self._unsafe("an object of something other than a class")
        return UnpickledObject(kind.name if isinstance(kind, AllowedClass) else f"{STRANGE}{kind.name}", args)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise self._unsafe("more values than its length allows")

    def _call(self, function: Any, args: Any) -> Any:
        if not isinstance(args, tuple):
            raise self._unsafe("arguments that are not a tuple")
        self._count()
        if isinstance(function, Stranger):
            last = function.name.rpartition(".")[2]
            if not last[:1].isupper():
                raise self._unsafe(f"it calls {function.name[:120]}, which is not on the list of harmless names")
            return UnpickledObject(f"{STRANGE}{function.name}", args)
        if isinstance(function, AllowedClass):
            return UnpickledObject(function.name, args)
        if not isinstance(function, AllowedCall):
            raise self._unsafe(f"a call of a {type(function).__name__}")
        if function.hashes:
            self._check_members(args)
        return function.function(*args)

    def _find(self, module: Any, name: Any) -> Any:
        key = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "?"
        if (
            key not in self._table
            and self._strangers
            and key != "?"
            and module.split(".")[0] not in _STANDARD
            and key.isprintable()
        ):
            return Stranger(key[:200])
        if key not in self._table:
            raise UnsafeContent(
                f"it asks for {key[:120]}, which is not on the list of harmless names", where=self._where
            )
        return self._table[key]

    def _set(self, target: dict[Any, Any], pairs: list[Any]) -> None:
        if len(pairs) % 2:
            raise self._unsafe("a key without a value")
        self._check_keys(target, pairs[::2])
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def _check_keys(self, target: Any, keys: list[Any]) -> None:
        """Refuse many keys with the same hash, as their cost is quadratic, and keys of many values. Hashes of text are salted."""
        guessable = [key for key in keys if type(key) in _HASHED]
        if not guessable:
            return
        for key in guessable:
            if type(key) in (tuple, frozenset) and self._nesting([key])[1] > KEY_VALUES_MAX:
                raise self._unsafe(f"a key of more than {KEY_VALUES_MAX} values")
        counts = self._hashes.setdefault(id(target), (target, Counter()))[1] if target is not None else Counter()
        for key in guessable:
            value = hash(key)
            counts[value] += 1
            if counts[value] > EQUAL_HASHES_MAX:
                raise self._unsafe("keys made to collide")

    def _list(self) -> list[Any]:
        top = self._stack[-1]
        return top.items if type(top) is UnpickledObject and self._strangers else self._top_of_kind(list)  # type: ignore[no-any-return]

    def _dict(self) -> dict[Any, Any]:
        top = self._stack[-1]
        return top.pairs if type(top) is UnpickledObject and self._strangers else self._top_of_kind(dict)  # type: ignore[no-any-return]

    def _tuple(self, items: list[Any]) -> tuple[Any, ...]:
        """Return a tuple that is not nested too deeply to be hashed: the interpreter hashes by recursion, without a
        stack check."""
        result = tuple(items)
        level, size = self._nesting(items)
        if level > 1:
            self._count()
            if level > LEVELS_MAX:
                raise self._unsafe("tuples nested too deeply")
            self._nested[id(result)] = result, level, size
        return result

    def _nesting(self, items: list[Any]) -> tuple[int, int]:
        """Return the levels of a tuple of ``items``, and the values that hashing it meets."""
        level, size = 1, len(items)
        for item in items:
            if type(item) in (tuple, frozenset):
                _, inner_level, inner_size = self._nested.get(id(item), (item, 1, len(item)))
                level, size = max(level, 1 + inner_level), size + inner_size
        return level, size

    def _check_members(self, args: tuple[Any, ...]) -> None:
        """Refuse arguments of a set or an OrderedDict with members, or keys of pairs, that take long to hash."""
        members = [item for argument in args if type(argument) in (list, tuple) for item in argument]
        self._check_keys(None, members)
        self._check_keys(None, [pair[0] for pair in members if type(pair) is list and pair])

    def _top_of_kind(self, kind: type) -> Any:
        top = self._stack[-1]
        if type(top) is not kind:
            raise self._unsafe(f"a {kind.__name__} is changed that is a {type(top).__name__}")
        return top

    def _pop_to_mark(self) -> list[Any]:
        stack = self._stack
        position = len(stack) - 1
        while stack[position] is not _MARK:
            position -= 1
            if position < 0:
                raise self._unsafe("a mark is missing")
        items = stack[position + 1 :]
        del stack[position:]
        return items

    def _plain(self, items: list[Any]) -> list[Any]:
        if any(item is _MARK for item in items):
            raise self._unsafe("a mark as a value")
        return items

    def _number(self, kind: struct.Struct) -> Any:
        return kind.unpack(self._take(kind.size))[0]

    def _take(self, length: int) -> bytes:
        end = self._at + length
        if end > len(self._data):
            raise self._unsafe("it ends too soon")
        data = self._data[self._at : end]
        self._at = end
        return data

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        line = self._data[self._at : end]
        self._at = end + 1
        return line.decode("utf-8")

    def _unsafe(self, what: str) -> UnsafeContent:
        return UnsafeContent(f"a pickle: {what}", where=self._where)
