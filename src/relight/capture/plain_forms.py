"""Configuration objects as plain values: dicts and lists that are stored in their place.

None of these packages is imported here: if an object of its classes exists, the package is loaded.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from argparse import Namespace
from collections import ChainMap, UserDict, UserList
from collections.abc import Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from relight.capture.standard_values import Unstorable


class PlainForm(NamedTuple):
    """What is stored in place of an object, and how the object is called in reports."""

    value: Any
    label: str


def plain_form(value: Any) -> PlainForm | None:
    """Return the plain form of a configuration object; None for other objects. Raise ``Unstorable``.

    The fields' values are not converted: the caller does that.
    """
    kind = type(value)
    if isinstance(value, (type, Enum, torch.Tensor, torch.nn.Module)) or kind.__module__.startswith("relight."):
        return None  # Relight's own objects are options: one under another keyword is a mistake
    form = _fields_of(value)
    return None if form is None else PlainForm(form, f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}")


def _fields_of(value: Any) -> Any:
    kind = type(value)
    if kind in (Namespace, SimpleNamespace):
        return dict(vars(value))
    if dataclasses.is_dataclass(value):
        return {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)
        }
    if isinstance(value, (MappingProxyType, ChainMap, UserDict)):
        return dict(value)
    if isinstance(value, UserList):
        return list(value.data)
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if "omegaconf" in packages:
        return _omegaconf(value)
    if "pydantic" in packages and hasattr(kind, "model_fields"):
        return dict(value)
    if "ml_collections" in packages and hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(names := getattr(kind, "__struct_fields__", None), tuple) and "msgspec" in packages:
        return {name: getattr(value, name) for name in names}
    if "attr" in sys.modules and (attributes := getattr(kind, "__attrs_attrs__", None)) is not None:
        return {attribute.name: getattr(value, attribute.name) for attribute in attributes}
    if isinstance(value, dict):
        return {key: dict.__getitem__(value, key) for key in dict.__iter__(value)}  # a class such as EasyDict
    return None


def _omegaconf(value: Any) -> Any:
    omegaconf = sys.modules["omegaconf"]
    if not isinstance(value, (omegaconf.DictConfig, omegaconf.ListConfig)):
        return None
    try:
        return omegaconf.OmegaConf.to_container(value, resolve=True, enum_to_str=False)
    except omegaconf.errors.OmegaConfBaseException as error:
        why = str(error).partition("\n")[0][:200]
        raise Unstorable(
            f"a configuration with a value that cannot be resolved ({why}): pass OmegaConf.to_container(config)"
        ) from error


def takes_back(live: Any) -> bool:
    """Return whether a restore puts stored fields into ``live``: objects of the standard library, not other packages'."""
    return type(live) in (Namespace, SimpleNamespace) or (dataclasses.is_dataclass(live) and not isinstance(live, type))


def fields_in(live: Any) -> Mapping[str, Any]:
    """Return the fields of an object that takes them back."""
    fields: Mapping[str, Any] = _fields_of(live)
    return fields


def with_fields(live: Any, values: Mapping[str, Any]) -> Any:
    """Return ``live`` with the stored fields; a frozen dataclass as a new object. No ``__init__`` runs."""
    if type(live) in (Namespace, SimpleNamespace):
        vars(live).clear()
        vars(live).update(values)
        return live
    target = live
    if type(live).__dataclass_params__.frozen:
        target = object.__new__(type(live))
        values = {**fields_in(live), **values}
    for name, value in values.items():
        object.__setattr__(target, name, value)
    return target


def way_out(value: Any) -> str:
    """Return what to pass in place of an object that cannot be saved, as far as its class shows; empty if unknown.

    Nothing of the object is called, and no attribute of the instance is read.
    """
    kind = type(value)
    if isinstance(value, (type, FunctionType, BuiltinFunctionType, MethodType)):
        return "pass its name, a text, or leave it out"
    if hasattr(kind, "get_secret_value"):
        return "leave secrets out: a checkpoint stores them in the clear"
    if kind is re.Pattern:
        return "pass .pattern of it"
    for name in ("to_dict", "model_dump", "asdict", "as_dict", "to_pydatetime"):
        if callable(getattr(kind, name, None)):
            return f"pass .{name}() of it"
    for base in (str, int, float, bytes, dict, list, tuple, set, frozenset):
        if isinstance(value, base):
            return f"pass {base.__name__}() of it"
    if hasattr(kind, "__next__"):
        return "leave it out, or give the object that it iterates over as a component with state_dict()"
    return ""
