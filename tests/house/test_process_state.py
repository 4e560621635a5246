"""State of a whole process, in a module, has its reason beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tree import ENGINES, SOURCES, rel

KINDS = ("dict", "set", "list", "deque", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary")


def unexplained(tree: ast.Module) -> Iterator[str]:
    """Yield the names of empty containers, and of variables that a function rebinds, without a docstring after them."""
    rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
            continue
        (target, *_) = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if not isinstance(target, ast.Name) or not (target.id in rebound or _is_empty_container(statement.value)):
            continue
        if not (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            yield target.id


def _is_empty_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.List):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.keys
    if not isinstance(value, ast.Call) or value.args:
        return False
    function = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in KINDS


def test_every_state_of_a_process_has_its_reason() -> None:
    """A container or variable that lives as long as the process states why it is not handed down as a value."""
    missing = [
        f"{rel(path)}: {name}"
        for path in [*SOURCES, *ENGINES]
        for name in unexplained(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not missing, "\n".join(["add a docstring with the reason:", *missing])


def test_the_search_finds_registers() -> None:
    """Lists, dicts, weak sets and rebound variables are found, explained ones and constants are not."""
    source = '''
a: list[int] = []
b = {}
c: weakref.WeakSet[int] = weakref.WeakSet()
"""Reason."""
d = deque[int]()
LIMIT = 3
last = None
def use():
    global last
    last = 1
'''
    assert list(unexplained(ast.parse(source))) == ["a", "b", "d", "last"]
