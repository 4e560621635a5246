"""Collect the texts of all errors, events, warnings and hints of the source into ``messages.md``.

A changed message is then a changed line in a review. ``python tests/house/messages.py`` writes the file again.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

from tree import SOURCES, rel

PAGE = Path(__file__).with_name("messages.md")
HEADER = """# Messages

The texts of errors, events, warnings and hints, by file.
`python tests/house/messages.py` writes this file, and `tests/house/test_messages.py` compares it with the source.
Fields are shown as `{name}`; `A | B` are the texts of a condition; `[…]` is `where`, and `→` precedes a hint.
"""
CALLS = ("emit", "warn", "_warn", "warning", "hint", "no_memory", "memory_refusals", "with_outcome")
"""Functions and methods that report their texts, next to the constructors of errors."""
INTERNAL = ("AssertionError", "AttributeError", "KeyError", "NotImplementedError")
"""Errors for authors of code, not for users."""
NAMED = ("what", "why", "details", "text", "message")
"""Keywords that are texts."""
SHOWN = {"where": " [{}]", "hint": " → {}"}
"""Keywords that are texts, and how they are shown."""
MISSING = "{…}"
"""A part that only the running program knows."""


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax tree of each source file."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


@cache
def error_names() -> frozenset[str]:
    """Return the names of all classes of errors: the built-in ones, and those of the source."""
    bases = {
        node.name: {ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases}
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    names = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
    while more := {name for name, above in bases.items() if above & names} - names:
        names |= more
    return frozenset(names)


class Scope:
    """The texts that names stand for: constants of the module, and assignments of one function."""

    def __init__(self, node: ast.AST, outer: Scope | None = None) -> None:
        self._node, self._outer = node, outer

    @cached_property
    def _values(self) -> dict[str, list[ast.expr]]:
        """Return the assigned expressions of each name."""
        values: dict[str, list[ast.expr]] = {}
        for inner in walk(self._node):
            if isinstance(inner, ast.Assign | ast.AnnAssign | ast.NamedExpr) and inner.value is not None:
                for target in inner.targets if isinstance(inner, ast.Assign) else [inner.target]:
                    assign(values, target, inner.value)
        return values

    def texts(self, name: str, depth: int) -> str | None:
        """Return the texts that are assigned to ``name``, or None if no value of it is a text."""
        if name in self._values:
            texts = [text for value in self._values[name] if (text := shown(value, self, depth)) is not None]
            return " | ".join(dict.fromkeys(texts)) or None
        return self._outer.texts(name, depth) if self._outer else None


def assign(values: dict[str, list[ast.expr]], target: ast.expr, value: ast.expr) -> None:
    """Add the value of a name to ``values``, and those of a tuple of names."""
    if isinstance(target, ast.Name):
        values.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for each, its_value in zip(target.elts, value.elts, strict=True):
            assign(values, each, its_value)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below ``node`` in the source's order, without those of inner functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield child
            yield from walk(child)


def shown(node: ast.expr, scope: Scope, depth: int = 0) -> str | None:
    """Return the text of an expression, or None if it is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_field(value, scope, depth) for value in node.values)
    if isinstance(node, ast.IfExp):
        parts = [shown(node.body, scope, depth), shown(node.orelse, scope, depth)]
        return " | ".join(part for part in parts if part) or None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = shown(node.left, scope, depth), shown(node.right, scope, depth)
        return None if left is None and right is None else f"{left or MISSING}{right or MISSING}"
    if isinstance(node, ast.Name) and depth < 3:
        return scope.texts(node.id, depth + 1)
    return None


def _field(value: ast.expr, scope: Scope, depth: int) -> str:
    """Return a part of an f-string: its text, or the name of what is filled in."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    assert isinstance(value, ast.FormattedValue)
    if isinstance(value.value, ast.IfExp):
        text = shown(value.value, scope, depth)
        return f"({text})" if text else MISSING
    name = ast.unparse(value.value)
    return f"{{{name}}}" if len(name) <= 60 else MISSING


def message(call: ast.Call, scope: Scope, label: str) -> str | None:
    """Return the line of a call that reports, or None if it passes no text with a space."""
    texts = [text for argument in call.args if (text := shown(argument, scope)) is not None]
    if label == "emit" and texts:
        label = f"event {texts.pop(0)}"
    line = " ".join(texts)
    for keyword in call.keywords:
        text = shown(keyword.value, scope)
        if text and keyword.arg in SHOWN:
            line += SHOWN[keyword.arg].format(text)
        elif text and keyword.arg in NAMED:
            line = f"{line} {text}"
    return f"{label}: {' '.join(line.split())}" if " " in line.strip() else None


def label_of(call: ast.Call, raised: bool) -> str | None:
    """Return how a call is listed: by its error class or function; None if it reports nothing to a user."""
    name = ast.unparse(call.func).rsplit(".", 1)[-1]
    reports = name in error_names() or name in CALLS or raised or any(word.arg == "hint" for word in call.keywords)
    return name.lstrip("_") if reports and name not in INTERNAL else None


def of(tree: ast.Module) -> list[str]:
    """Return the lines of one file, each once, in the order of the source."""
    lines: dict[str, None] = {}

    def visit(node: ast.AST, scope: Scope, raised: bool = False) -> None:
        if isinstance(node, ast.Call) and (label := label_of(node, raised)) and (line := message(node, scope, label)):
            lines[line] = None
        for child in ast.iter_child_nodes(node):
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            visit(child, Scope(child, scope) if inner else scope, isinstance(node, ast.Raise))

    visit(tree, Scope(tree))
    return list(lines)


def page() -> str:
    """Return the text of ``messages.md``."""
    sections = [
        f"## {rel(path)}\n\n" + "".join(f"- {line}\n" for line in lines)
        for path, tree in trees().items()
        if (lines := of(tree))
    ]
    return "\n".join([HEADER, *sections])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
