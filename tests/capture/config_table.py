"""The kinds of values that people put into a configuration, and what becomes of each. The page's table is made from it."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import pathlib
import re
import types
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pydantic
import torch

OWN, LIVE, PLAIN, REFUSED = "own type", "live class", "plain", "refused"


class Colour(enum.Enum):
    RED, BLUE = "red", "blue"


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class Mode(enum.StrEnum):
    FAST = "fast"


class Flags(enum.Flag):
    A, B = 1, 2


class Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass
class Config:
    rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    colour: Colour = Colour.RED


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    rate: float = 0.1


class Model(pydantic.BaseModel):
    rate: float = 0.1
    colour: Colour = Colour.RED
    where: pathlib.PurePosixPath = pathlib.PurePosixPath("a")


class Struct(msgspec.Struct):
    rate: float = 0.1


class EasyDict(dict):
    """A dict with its entries as attributes, as several packages have it."""

    __getattr__ = dict.__getitem__


class Tagged(str):
    pass


class Names(list):
    pass


class Plain:
    def __init__(self) -> None:
        self.rate = 0.1


class HasToDict(Plain):
    def to_dict(self) -> dict[str, float]:
        return {"rate": self.rate}


class Secret:
    def get_secret_value(self) -> str:
        return "hunter2"


def dict_config() -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create({"model": {"width": 64, "deep": "${model.width}"}, "colours": ["red"]})


def list_config() -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create([1, {"a": 2}])


def unresolved() -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create({"a": "${missing.key}"})


def attrs_object() -> Any:
    import attrs

    return attrs.make_class("Attrs", {"rate": attrs.field(default=0.1)})()


class Kind(NamedTuple):
    """A kind of value: how it is called, how to make one, and what becomes of it."""

    title: str
    make: Callable[[], Any]
    outcome: str
    form: str = ""
    """LIVE, PLAIN: what is stored. REFUSED: the way out, as the error's text has it."""
    needs: str = ""


UTC, BERLIN = dt.UTC, zoneinfo.ZoneInfo("Europe/Berlin")
KINDS = [
    *(Kind(title, (lambda value: lambda: value)(value), OWN) for title, value in [
        ("`None`", None), ("`bool`", True), ("`int`", 7), ("an `int` of 100 digits", 10**99), ("`float`", 0.1), ("NaN, infinity", float("-inf")),
        ("`complex`", 1 + 2j), ("`str`", "aé"), ("`bytes`", b"\x00\xff"), ("`bytearray`", bytearray(b"ab")), ("`list`", [1, [2.0]]),
        ("`tuple`", (1, ("a",))), ("`dict`, with keys of any plain type", {1: "a", ("b", 2): None}), ("`set`", {1, "a"}),
        ("`frozenset`", frozenset({1, 2})), ("`range`", range(2, 20, 3)), ("`slice` of integers", slice(1, None, 2)),
        ("`pathlib.Path`", pathlib.Path("/data/a b")), ("`PurePosixPath`", pathlib.PurePosixPath("a/b")),
        ("`PureWindowsPath`", pathlib.PureWindowsPath("C:/a")),
        ("`datetime`, naive", dt.datetime(2026, 11, 28, 4, 5, 6, 789, fold=1)), ("`datetime` in UTC", dt.datetime(2026, 11, 28, tzinfo=UTC)),
        ("`datetime` with a `ZoneInfo`", dt.datetime(2026, 7, 1, tzinfo=BERLIN)), ("`date`", dt.date(2026, 11, 28)),
        ("`time`", dt.time(4, 5, tzinfo=UTC)), ("`timedelta`", dt.timedelta(days=-1, microseconds=1)),
        ("`timezone`", dt.timezone(dt.timedelta(hours=5, minutes=30), "IST")), ("`ZoneInfo`", BERLIN),
        ("`Decimal`", decimal.Decimal("0.10")), ("`Fraction`", fractions.Fraction(1, 3)), ("`UUID`", uuid.UUID(int=7)),
        ("`torch.Size`", torch.Size([2, 3])), ("`torch.dtype`", torch.bfloat16), ("`torch.device`", torch.device("cuda", 1)),
        ("`torch.layout`", torch.sparse_csr), ("`torch.memory_format`", torch.channels_last), ("`torch.Tensor`", torch.arange(3)),
        ("`numpy.ndarray`", np.arange(4, dtype=np.int16)), ("`numpy.float32` and other scalars", np.float32(0.1)),
        ("`numpy.datetime64`", np.datetime64("2026-11-28")), ("`numpy.dtype`", np.dtype("<f4")),
    ]),
    Kind("`Enum`", lambda: Colour.BLUE, LIVE, "its value"), Kind("`IntEnum`", lambda: Level.HIGH, LIVE, "its value"),
    Kind("`StrEnum`", lambda: Mode.FAST, LIVE, "its value"), Kind("`Flag`", lambda: Flags.A | Flags.B, LIVE, "its value"),
    Kind("`namedtuple`, `NamedTuple`", lambda: Point(1, 2.0), LIVE, "tuple"),
    Kind("`deque`", lambda: collections.deque([1, 2], maxlen=5), LIVE, "list"),
    Kind("`OrderedDict`", lambda: collections.OrderedDict(b=1, a=2), LIVE, "dict"),
    Kind("`defaultdict`", lambda: collections.defaultdict(list, a=[1]), LIVE, "dict"),
    Kind("`Counter`", lambda: collections.Counter("aab"), LIVE, "dict"),
    Kind("a subclass of `dict`, such as `EasyDict`", lambda: EasyDict(a=1), LIVE, "dict"),
    Kind("`argparse.Namespace`", lambda: argparse.Namespace(rate=0.1, data=pathlib.Path("a")), LIVE, "dict"),
    Kind("`SimpleNamespace`", lambda: types.SimpleNamespace(rate=0.1), LIVE, "dict"),
    Kind("dataclass", lambda: Config(0.2, (0.8, 0.9), Colour.BLUE), LIVE, "dict of its fields"),
    Kind("frozen dataclass", lambda: Frozen(0.2), LIVE, "dict of its fields"),
    Kind("OmegaConf `DictConfig`", dict_config, PLAIN, "dict, interpolations resolved", "omegaconf"),
    Kind("OmegaConf `ListConfig`", list_config, PLAIN, "list, interpolations resolved", "omegaconf"),
    Kind("pydantic model", lambda: Model(rate=0.2), PLAIN, "dict of its fields"),
    Kind("attrs class", attrs_object, PLAIN, "dict of its fields", "attrs"),
    Kind("`msgspec.Struct`", lambda: Struct(0.2), PLAIN, "dict of its fields"),
    Kind("`MappingProxyType`", lambda: types.MappingProxyType({"a": 1}), PLAIN, "dict"),
    Kind("`ChainMap`", lambda: collections.ChainMap({"a": 1}, {"b": 2}), PLAIN, "dict"),
    Kind("`UserDict`", lambda: collections.UserDict(a=1), PLAIN, "dict"), Kind("`UserList`", lambda: collections.UserList([1]), PLAIN, "list"),
    Kind("a configuration that cannot be resolved", unresolved, REFUSED, "OmegaConf.to_container(config)", "omegaconf"),
    Kind("a subclass of `str`, `int`, `float`", lambda: Tagged("x"), REFUSED, "pass str() of it"),
    Kind("a subclass of `list`, `tuple`, `set`", lambda: Names([1]), REFUSED, "pass list() of it"),
    Kind("an object with `to_dict()`", HasToDict, REFUSED, "pass .to_dict() of it"),
    Kind("any other object", Plain, REFUSED, "give its fields as plain values"),
    Kind("pydantic `SecretStr`, which would be stored in the clear", Secret, REFUSED, "leave secrets out"),
    Kind("a class", lambda: Plain, REFUSED, "pass its name"), Kind("a function", lambda: len, REFUSED, "pass its name"),
    Kind("`functools.partial`", lambda: functools.partial(int, base=2), REFUSED, "give its fields as plain values"),
    Kind("an iterator, a generator", lambda: iter([1]), REFUSED, "leave it out, or give the object that it iterates over as a component"),
    Kind("an open file", io.BytesIO, REFUSED, "leave it out"),
    Kind("`re.Pattern`", lambda: re.compile("a"), REFUSED, "pass .pattern of it"),
    Kind("a lone surrogate in a `str`", lambda: "\ud800", REFUSED, "not valid Unicode"),
    Kind("a path that is not Unicode", lambda: pathlib.Path("a\udc80"), REFUSED, "pass os.fsencode() of it"),
    Kind("an `Enum` as a key of a dict", lambda: {Colour.RED: 1}, REFUSED, "pass str() or another plain value of it"),
    Kind("a NumPy array of objects", lambda: np.array([object()]), REFUSED, "pass .tolist() of it, if its elements are plain values"),
    Kind("a tensor in a dataclass or other configuration object", lambda: Config(rate=torch.ones(1)), REFUSED, "give it as a component"),
]  # fmt: skip


def table() -> list[str]:
    """Return the lines of the page's table."""
    words = {
        OWN: lambda kind: "its own type",
        LIVE: lambda kind: f"{kind.form}; the class of the live value",
        PLAIN: lambda kind: kind.form,
        REFUSED: lambda kind: f"refused: {kind.form}",
    }
    rows = [f"| {kind.title} | {words[kind.outcome](kind)} |" for kind in KINDS]
    return ["| Value | Comes back as |", "|---|---|", *rows]
