"""Private names of torch are used in ``torch_private.py`` of two rooms, or are listed here with their reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from tree import SOURCES, rel

HOMES = ("comm/torch_private.py", "supervise/torch_private.py")
ALLOWED = {
    "capture/flattened.py": (
        "FullyShardedDataParallel keeps the state between two steps in private attributes, and frees gathered parameters by these functions",
        {
            "torch.distributed.fsdp._runtime_utils._lazy_init",
            "torch.distributed.fsdp._runtime_utils._reshard",
            "torch.distributed.utils._free_storage",
        },
    ),
    "capture/own_loading.py": (
        "whether a module overrides the method that torch documents for it; the guard that torch documents for tensor subclasses",
        {"nn.Module._save_to_state_dict", "torch._C"},
    ),
    "capture/rebuild.py": (
        "quantized tensors are made from their parts by nothing public",
        {"torch._make_per_channel_quantized_tensor", "torch._make_per_tensor_quantized_tensor"},
    ),
    "capture/tensors.py": ("the layout of MKL-DNN tensors has no public name", {"torch._mkldnn"}),
    "capture/workers.py": (
        "the seed that a worker gives numpy: torch computes it in a private function only",
        {"torch.utils.data._utils.worker", "torch_worker._generate_state"},
    ),
    "checkpointer/outside_state.py": (
        "whether a module overrides the method that torch documents for it",
        {"nn.Module._save_to_state_dict"},
    ),
    "checkpointer/workers.py": (
        "loaders have no public hook after torch's own signal handlers; without these names, workers run unprotected",
        {
            "signal_handling._set_worker_signal_handlers",
            "torch.utils.data._utils.signal_handling",
            "torch.utils.data._utils.worker",
        },
    ),
}
"""By file: why nothing public serves, and the private names that it uses."""
WITHOUT_TORCH = ("export/", "importers/")
"""Rooms without torch. Their texts name classes in pickles of other tools, and nothing is imported by them."""
ELASTIC = ("supervise/", "comm/")
"""Rooms in which attributes of torch's objects are checked as well: capture needs the insides of tensors and modules."""
NOT_TORCHS = {"supervise/launch.py": {"_option_string_actions", "_actions"}}  # argparse's
_IN_TEXT = re.compile(r"torch(?:\.\w+)*\._(?!_)\w+(?:\.\w+)*")


def is_private(name: str) -> bool:
    """Return whether a name has one leading underscore."""
    return name.startswith("_") and not name.startswith("__")


def torch_roots(tree: ast.Module) -> dict[str, str]:
    """Return what a module imports from torch: each local name, and the name in torch."""
    roots = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            roots |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            roots |= {alias.asname or "torch": alias.name if alias.asname else "torch" for alias in names}
    return roots


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield a module's private names of torch: imported, read from an imported name, or in a text that names one."""
    roots = torch_roots(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _IN_TEXT.fullmatch(alias.name))
    yield from (name for name in roots.values() if _IN_TEXT.fullmatch(name))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            names, value = [node.attr], node.value
            while isinstance(value, ast.Attribute):
                names, value = [value.attr, *names], value.value
            if isinstance(value, ast.Name) and value.id in roots:
                yield ".".join([value.id, *names])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if _IN_TEXT.fullmatch(node.value):
                yield node.value


def attributes_of_torch(tree: ast.Module) -> Iterator[str]:
    """Yield private attributes that no class of this module has: of other objects, or inherited from a class of torch."""
    roots = torch_roots(tree)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {cls.name: set(_defined_in(cls)) for cls in classes}
    everywhere = set().union(*own.values())
    for cls in classes:
        from_torch = any(isinstance(base, ast.Name) and base.id in roots for base in cls.bases)
        for node in ast.walk(cls):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and _is_self(node.value):
                if from_torch and node.attr not in own[cls.name]:
                    yield node.attr
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not _is_self(node.value):
            if node.attr not in everywhere:
                yield node.attr
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr")
            and isinstance(node.args[1], ast.Constant)
            and is_private(str(node.args[1].value))
        ):
            yield str(node.args[1].value)


def _is_self(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else node
    return isinstance(called, ast.Name) and called.id in ("self", "super", "cls")


def _defined_in(cls: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(cls):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_private_names_of_torch_are_listed_with_their_reason() -> None:
    """A new private name needs a function in ``torch_private.py``; a listed one that is gone leaves the list."""
    users = {
        rel(path): names
        for path in SOURCES
        if rel(path) not in HOMES
        and not rel(path).startswith(WITHOUT_TORCH)
        and (names := set(private_names(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert users == {name: names for name, (_, names) in ALLOWED.items()}


def test_nothing_is_patched_elsewhere() -> None:
    """No module uses ``unittest.mock``: ``torch_private.py`` replaces names of torch by a context manager of its own."""
    mock = re.compile(r"unittest\.mock|unittest import|\bmock\b")  # unittest.SkipTest skips a test of a shipped suite
    assert not [rel(path) for path in SOURCES if mock.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if rel(path).startswith(ELASTIC) and rel(path) not in HOMES],
    ids=rel,
)
def test_attributes_of_torchs_objects_are_public(path: object) -> None:
    """A class of torch's agent or rendezvous has private attributes, and only ``torch_private.py`` uses them."""
    source = SOURCES[SOURCES.index(path)]  # type: ignore[arg-type]
    tree = ast.parse(source.read_text(encoding="utf-8"))
    if len(torch_roots(tree)) > 1:
        assert set(attributes_of_torch(tree)) <= NOT_TORCHS.get(rel(source), set())


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from torch.distributed.elastic import _x", {"torch.distributed.elastic._x"}),
        ("import torch.utils._pytree as tree", {"torch.utils._pytree"}),
        ("import torch.distributed as dist\ndist.c10d._store()", {"dist.c10d._store"}),
        ("from torch import nn\nnn.Module._parameters\nnn.Module.__init__", {"nn.Module._parameters"}),
        ("LOOPS = ('torch.utils.data._utils.worker',)", {"torch.utils.data._utils.worker"}),
        ("'''torch._C is a name in a docstring.'''\nself._x = torch.nn", set()),
    ],
)
def test_the_check_finds_private_names(source: str, names: set[str]) -> None:
    """Imports, attributes and texts count; docstrings and the module's own names do not."""
    assert set(private_names(ast.parse(source))) == names


AGENT = """
from torch.elastic import Agent
class Own(Agent):
    def _start(self):
        self._mine = 1
        super()._start()
        return self._pcontext, self._mine
def of(handler):
    return getattr(handler, "_state", None), handler._executor
"""


def test_the_check_finds_private_attributes() -> None:
    """Inherited attributes and those of other objects count; overridden methods and the class's own do not."""
    assert set(attributes_of_torch(ast.parse(AGENT))) == {"_pcontext", "_state", "_executor"}
