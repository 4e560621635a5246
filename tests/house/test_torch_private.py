"""Private names of torch are used in the room ``torch_private`` only. ``docs/torch-versions.md`` lists them.

``python tests/house/test_torch_private.py`` writes that list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from pathlib import Path

import pytest
from tree import ROOT, SOURCES, rel

from relight.torch_private import torchrun
from relight.torch_private.names import SUPPORTED
from relight.torch_private.table import TABLE

HOME = "torch_private/"
PAGE = ROOT / "docs" / "torch-versions.md"
TABLE_BEGINS = "| Name | Used for | Without it |\n|---|---|---|\n"
ELSEWHERE = [path for path in SOURCES if not rel(path).startswith(HOME)]
WITHOUT_TORCH = ("export/", "importers/")
"""Rooms without torch. Their texts name classes in pickles of other tools, and nothing is imported by them."""
OTHERS = {
    "capture/delivered.py": {"_getframe"},  # of sys
    "capture/loader_watch.py": {"_num_iter_calls"},  # of Fabric's loader
    "capture/node_loaders.py": {"_cached_item", "_cached_state_dict", "_it", "_iter_for_state_dict"},  # of torchdata
    "capture/rng.py": {"_inst"},  # of random
    "capture/units.py": {"_ex_iterable"},  # of Hugging Face's datasets
    "checkpointer/workers.py": {"_send_signal"},  # of multiprocessing
    "cli/audited.py": {"_protected_args"},  # of click
    "comm/tls.py": {"_SSLMethod"},  # of ssl
    **dict.fromkeys(
        (
            "decode.py",
            "keys/providers.py",
            "observe/console.py",
            "observe/events.py",
            "store/object_client.py",
            "store/probe.py",
        ),
        {"_at_fork_reinit"},  # of threading
    ),
    "integrations/lightning.py": {"_data_fetcher"},  # of Lightning's loop
    "supervise/launch.py": {"_actions"},  # of argparse
}
"""By file: private attributes of other libraries' objects."""
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}
"""Names of named tuples, which are documented, and ``os._exit``."""
HOLDING = ("capture/", "checkpointer/", "comm/", "integrations/", "ranks/", "restore/", "snapshot/", "supervise/")
"""Rooms that hold torch's objects. In others, a listed name as a text is a key of a file."""
ACCESSORS = ("getattr", "hasattr", "setattr", "delattr", "attrgetter")
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


def attributes_of_others(tree: ast.Module, known: Set[str] = frozenset()) -> Iterator[str]:
    """Yield private attributes that no class of this module has, nor ``known``: of other objects, or inherited from torch.

    Also private names that a function such as ``getattr`` or ``attrgetter`` gets as text.
    """
    roots = torch_roots(tree)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {cls.name: set(_defined_in(cls)) for cls in classes}
    everywhere = known.union(*own.values())
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
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ACCESSORS:
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from (text for text in texts if isinstance(text, str) and is_private(text))


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
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@pytest.mark.parametrize("path", [path for path in ELSEWHERE if not rel(path).startswith(WITHOUT_TORCH)], ids=rel)
def test_no_other_room_imports_a_private_name(path: Path) -> None:
    """A private name needs a function in the room ``torch_private``, and a fall-back."""
    assert not set(private_names(ast.parse(path.read_text(encoding="utf-8"))))


def test_no_other_room_reads_a_private_attribute() -> None:
    """A private attribute is one that a class of Relight has, or is listed with its library."""
    trees = {rel(path): ast.parse(path.read_text(encoding="utf-8")) for path in ELSEWHERE}
    own = {
        name
        for tree in trees.values()
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef)
        for name in _defined_in(cls)
    }
    used = {name: set(attributes_of_others(tree, own)) - PUBLIC for name, tree in trees.items()}
    assert {name: names for name, names in used.items() if names} == OTHERS


NAMES = {name.name for name in (*TABLE, *torchrun.NAMES) if is_private(name.name)}


def test_no_other_room_has_the_text_of_a_listed_name() -> None:
    """A name could also be read through ``vars()``. Attributes of Relight's own that are called so are read by their class."""
    texts: dict[str, set[str]] = {}
    for path in [path for path in ELSEWHERE if rel(path).startswith(HOLDING)]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        own = {name for cls in ast.walk(tree) if isinstance(cls, ast.ClassDef) for name in _defined_in(cls)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in docstrings else None
            if isinstance(text, str) and text in NAMES:
                texts.setdefault(rel(path), set()).add(text)
            elif isinstance(node, ast.Attribute) and node.attr in NAMES - own and not _is_self(node.value):
                texts.setdefault(rel(path), set()).add(node.attr)
    assert not texts


def test_nothing_is_patched_elsewhere() -> None:
    """No module uses ``unittest.mock``: ``torch_private.py`` replaces names of torch by a context manager of its own."""
    mock = re.compile(r"unittest\.mock|unittest import|\bmock\b")  # unittest.SkipTest skips a test of a shipped suite
    assert not [rel(path) for path in SOURCES if mock.search(path.read_text(encoding="utf-8"))]


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
    assert set(attributes_of_others(ast.parse(AGENT))) == {"_pcontext", "_state", "_executor"}


def table() -> str:
    """Return the table of the page: each name once for each use."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in (*TABLE, *torchrun.NAMES):
        rows.setdefault((name.use, name.otherwise), []).append(name.name)
    return TABLE_BEGINS + "".join(
        f"| {' '.join(f'`{name}`' for name in names)} | {use} | {otherwise} |\n"
        for (use, otherwise), names in rows.items()
    )


def test_the_page_has_all_names() -> None:
    """``docs/torch-versions.md`` has the table, and the versions in which the names were texts."""
    page = PAGE.read_text(encoding="utf-8")
    assert table() in page, "python tests/house/test_torch_private.py writes it"
    assert f"torch {SUPPORTED}" in page


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    begin = text.index(TABLE_BEGINS)
    rows = text[begin:].split("\n\n")[0]
    PAGE.write_text(text.replace(rows.rstrip("\n") + "\n", table()), encoding="utf-8")
