"""Tensor subclasses and simple objects in a state: stored by their parts, restored into live ones.

No class is found by a stored name.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict, deque
from collections.abc import Mapping
from copy import copy
from enum import Enum
from typing import Any

import torch

from relight.capture.sharded import is_spread
from relight.capture.tensors import USUAL
from relight.capture.typed_values import is_named_tuple, member
from relight.torch_private.optimizers import clear_step_hooks

CLASS = "relight.class"
"""Key of the dict that stands for an object or a tensor of a subclass: ``module:qualified name`` of its class, for messages."""
FORM = "relight.form"
"""Key next to it, for tensors only: what must be equal in the live tensor."""
PERMUTED = "torch:permuted"
"""Stands for a class in the node of a transposed tensor in an optimizer's state."""
VALUE, ITEMS, _DEQUE = "value", "items", "collections:deque"
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


def flattens(value: Any) -> bool:
    """Return whether ``value`` is a tensor that consists of inner tensors, as ``__tensor_flatten__`` lists them."""
    return (
        isinstance(value, torch.Tensor)
        and type(value) not in USUAL
        and hasattr(value, "__tensor_flatten__")
        and not is_spread(value)
    )


def name_of(value: Any) -> str:
    """Return ``module:qualified name`` of the class."""
    return f"{type(value).__module__}:{type(value).__qualname__}"


def parts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the inner tensors by attribute."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}


def form_of(tensor: torch.Tensor) -> list[Any]:
    """Return what the class needs apart from its inner tensors, as plain values that can be compared."""
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [list(tensor.shape), str(tensor.dtype), _described(context)]


def _described(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {str(key): _described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    if isinstance(value, (torch.dtype, torch.device, torch.layout)):
        return str(value)
    attributes = getattr(value, "__dict__", None)
    if (
        isinstance(attributes, dict)
        and not callable(value)
        and all(type(item) in _PLAIN for item in attributes.values())
    ):
        return [type(value).__qualname__, dict(attributes)]
    return type(value).__qualname__


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold the values: a subclass's inner tensors, otherwise the tensor itself."""
    if not flattens(tensor):
        return [tensor]
    return [plain for part in parts_of(tensor).values() for plain in inner_tensors(part)]


def is_simple(value: Any) -> bool:
    """Return whether ``value`` is an object of a Python class, with its whole state in its ``__dict__``."""
    kind = type(value)
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or callable(value) or isinstance(value, (type, torch.Tensor, torch.nn.Module)):
        return False
    # Py_TPFLAGS_HEAPTYPE
    if kind.__module__ in ("builtins", "enum") or hasattr(kind, "__members__") or not kind.__flags__ & (1 << 9):
        return False
    if any(base.__module__ == "builtins" and base is not object for base in kind.__mro__):
        return False  # a subclass of dict, list, int ...: its content is elsewhere
    if any(base.__dict__.get("__slots__") for base in kind.__mro__):
        return False
    return all(getattr(kind, name, None) is getattr(object, name, None) for name in _PICKLING)


def typed_parts(value: Any) -> dict[str, Any] | None:
    """Return what is stored of an enum, a deque or a named tuple in an optimizer's state; None for other values."""
    if isinstance(value, Enum):
        return {VALUE: value.value}
    if type(value) is deque:
        return {ITEMS: list(value), "maxlen": value.maxlen}
    return {ITEMS: tuple(value)} if is_named_tuple(value) else None


def order_of(tensor: torch.Tensor) -> list[int] | None:
    """Return the order of dimensions in which the memory of ``tensor`` is contiguous.

    None for the usual orders, and if there is none. A kernel may add up the elements of a transposed tensor in another
    order, so its next result may differ in the last bits.
    """
    if tensor.ndim < 2 or tensor.layout != torch.strided or tensor.is_contiguous() or not tensor.numel():
        return None
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return None
    if tensor.ndim == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return None
    order = sorted(range(tensor.ndim), key=lambda dim: -tensor.stride()[dim])
    return order if tensor.permute(order).is_contiguous() else None


def is_mark(node: Any) -> bool:
    """Return whether a stored node stands for an object or a tensor of a subclass."""
    return type(node) is dict and CLASS in node


def marked(node: Any) -> bool:
    """Return whether ``node`` contains a node that stands for an object or a tensor of a subclass."""
    if type(node) is dict:
        return CLASS in node or any(map(marked, node.values()))
    return type(node) in (list, tuple) and any(map(marked, node))


def unfit(node: Any, live: Any) -> str | None:
    """Return why ``live`` cannot take the objects in ``node``; None if it can."""
    if is_mark(node):
        if FORM in node:
            return unfit_parts(node, live)
        if node[CLASS] == PERMUTED:
            order = node.get("order")
            sound = (
                isinstance(order, list)
                and all(type(part) is int for part in order)
                and sorted(order) == list(range(len(order)))
            )
            return (
                None
                if sound and "data" in node
                else "stored as a transposed tensor without a valid order of its dimensions"
            )
        if node[CLASS] == _DEQUE and isinstance(node.get(ITEMS), list):
            return unfit(node[ITEMS], list(live) if isinstance(live, deque) else [])
        if isinstance(live, Enum) or is_named_tuple(live):
            if name_of(live) != node[CLASS]:
                return f"a value of class {node[CLASS]} is stored, the live one is of class {name_of(live)}"
            return unfit(node[ITEMS], live) if is_named_tuple(live) else None
        if not is_simple(live):
            return f"an object of class {node[CLASS]} is stored, and no live object is there that could take its state"
        if name_of(live) != node[CLASS]:
            return f"an object of class {node[CLASS]} is stored, the live one is of class {name_of(live)}"
        attributes = vars(live)
        return next(
            (
                why
                for key, part in node.items()
                if key != CLASS and (why := unfit(part, attributes.get(key))) is not None
            ),
            None,
        )
    if type(node) is dict:
        below = live if isinstance(live, dict) else {}
        return next((why for key, part in node.items() if (why := unfit(part, below.get(key))) is not None), None)
    if type(node) in (list, tuple):
        return next(
            (why for index, part in enumerate(node) if (why := unfit(part, _at(live, index))) is not None), None
        )
    return None


def unfit_parts(node: Mapping[str, Any], live: Any) -> str | None:
    """Return why the inner tensors of ``live`` cannot take those of a stored tensor; None if they can."""
    if live is None:
        return f"a tensor of class {node[CLASS]} is stored, and no live one is there that could take its values"
    if not flattens(live):
        return f"stored as a tensor of class {node[CLASS]}, the live object is a {type(live).__qualname__}"
    if name_of(live) != node[CLASS]:
        return f"stored as a tensor of class {node[CLASS]}, the live one is of class {name_of(live)}"
    if form_of(live) != node[FORM] or parts_of(live).keys() != node.keys() - {CLASS, FORM}:
        return f"a {node[CLASS]} with other settings is stored: {node[FORM]}, the live one has {form_of(live)}"
    return None


def _fill(node: Mapping[str, Any], live: torch.Tensor) -> None:
    for name, part in parts_of(live).items():
        if flattens(part):
            _fill(node[name], part)
        else:
            part.copy_(node[name])


def _at(live: Any, index: int) -> Any:
    if not isinstance(live, (list, tuple)) or not live:
        return None
    return live[min(index, len(live) - 1)]


def revived(value: Any, live: Any, device: torch.device | None = None) -> Any:
    """Return a restored value with its objects: the live ones, with the stored attributes.

    ``unfit`` must have returned None. Tensors go to the device of the live tensor in their place, or to ``device``.
    """
    if type(value) is dict and FORM in value:
        _fill(value, live)
        return live
    if type(value) is dict and CLASS in value:
        if value[CLASS] == PERMUTED:
            order = value["order"]
            data: torch.Tensor = revived(value["data"], live, device)
            return data.permute([order.index(dim) for dim in range(len(order))])
        if value[CLASS] == _DEQUE and ITEMS in value:
            return deque(
                revived(value[ITEMS], list(live) if isinstance(live, deque) else [], device), value.get("maxlen")
            )
        if isinstance(live, Enum):
            return member(live, value.get(VALUE), value[CLASS])
        if is_named_tuple(live):
            return type(live)._make(revived(tuple(value[ITEMS]), live, device))
        attributes = dict(vars(live))
        restored = {key: revived(part, attributes.get(key), device) for key, part in value.items() if key != CLASS}
        vars(live).clear()
        vars(live).update(restored)
        return live
    if type(value) is dict:
        below = live if isinstance(live, dict) else {}
        return {key: revived(part, below.get(key), device) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(revived(part, _own_at(live, index), device) for index, part in enumerate(value))
    if isinstance(value, torch.Tensor):
        target = live.device if isinstance(live, torch.Tensor) else device
        return value.to(target) if target is not None and value.device != target else value
    return value


def _own_at(live: Any, index: int) -> Any:
    item = _at(live, index)
    if isinstance(live, (list, tuple)) and index < len(live):
        return item
    if not is_simple(item):
        return None
    clone = object.__new__(type(item))  # the stored list is longer than the live one
    vars(clone).update(vars(item))
    return clone


def first_state(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[Any, Any]]:
    """Return the state that the optimizer's first step would create, by parameter.

    The optimizer and its parameters do not change: a copy of the optimizer makes the step, with copies of the
    parameters and zero gradients. Costs three times the memory of the parameters. Raises errors of the optimizer's code.
    """
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            clone = copies[parameter] = torch.nn.Parameter(parameter.detach().clone(), requires_grad=True)
            clone.grad = torch.zeros_like(clone)
    scratch = object.__new__(type(optimizer))
    attributes = {
        key: copy(value) if isinstance(value, (dict, list, set)) else value for key, value in vars(optimizer).items()
    }
    attributes.pop("step", None)  # schedulers wrap the live optimizer's step in a counter
    vars(scratch).update(attributes)
    clear_step_hooks(scratch)
    scratch.state = defaultdict(dict)
    scratch.param_groups = [
        {**group, "params": [copies[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    step = type(optimizer).step
    numpy = sys.modules.get("numpy")
    drawn, drawn_numpy = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            getattr(step, "__wrapped__", step)(scratch)  # without the hooks for steps of live optimizers
    finally:
        random.setstate(drawn)
        if numpy is not None:
            numpy.random.set_state(drawn_numpy)
    return {parameter: dict(scratch.state.get(clone, {})) for parameter, clone in copies.items()}
