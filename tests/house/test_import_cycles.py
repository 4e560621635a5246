"""The modules of ``src/relight`` import each other without cycles, also for types.

Import-linter holds the rooms apart. It allows cycles within a room, and does not distinguish where an import stands.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import grimp
import pytest
from tree import PRODUCT

MODULE, TYPES, FUNCTION = "module-level", "TYPE_CHECKING", "function-level"
"""The kinds of imports: executed with the module, never executed, executed by a call."""
ALLOWED = {
    (
        "relight.demo.report",
        "relight.demo.view",
    ): "rich prints a report by its method, which needs rich: only the demo of a terminal imports it",
}
"""Function-level imports that close a cycle: importer, imported module, and the reason."""


class Edge(NamedTuple):
    """One module imports another."""

    importer: str
    imported: str
    kind: str


def kinds_of(source: str) -> dict[int, str]:
    """Return the kind of each import statement by its line."""
    kinds: dict[int, str] = {}

    def visit(node: ast.AST, kind: str) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            kinds[node.lineno] = kind
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            kind = FUNCTION
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                visit(child, TYPES)
            for child in node.orelse:
                visit(child, kind)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, kind)

    visit(ast.parse(source), MODULE)
    return kinds


def edges_of(root: Path) -> set[Edge]:
    """Return who imports whom in the package in the directory ``root``, once for each kind."""
    graph = grimp.build_graph(root.name, cache_dir=None)
    edges = set()
    for importer in graph.modules:
        base = root.joinpath(*importer.split(".")[1:])
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        kinds = kinds_of(file.read_text(encoding="utf-8"))
        for imported in graph.find_modules_directly_imported_by(importer):
            for detail in graph.get_import_details(importer=importer, imported=imported):
                edges.add(Edge(importer, imported, kinds[detail["line_number"]]))
    return edges


def cycles(edges: Iterable[Edge]) -> list[str]:
    """Return cycles that have no import in common, each as text."""
    imports: dict[str, dict[str, str]] = {}
    for importer, imported, kind in sorted(edges):
        imports.setdefault(importer, {})[imported] = kind
    closed = []
    while True:
        try:
            graphlib.TopologicalSorter(imports).prepare()
        except graphlib.CycleError as error:
            path = error.args[1][:0:-1]  # each module imports the next, the last one the first
            first = path.index(min(path))
            path = [*path[first:], *path[: first + 1]]
            steps = list(zip(path, path[1:], strict=False))
            closed.append(path[0] + "".join(f" -({imports[a][b]})-> {b}" for a, b in steps))
            for a, b in steps:
                del imports[a][b]
        else:
            return closed


@pytest.fixture(scope="module")
def edges() -> set[Edge]:
    """The imports of the package."""
    package = edges_of(PRODUCT)
    assert len(package) > 3000 and {edge.kind for edge in package} == {MODULE, TYPES, FUNCTION}
    return package


def test_modules_and_types_have_no_cycle(edges: set[Edge]) -> None:
    """A type that two modules need is in a module below both. So any module can be read, tested and moved with what is below it."""
    assert cycles(edge for edge in edges if edge.kind != FUNCTION) == []


def test_a_cycle_through_a_function_has_a_reason(edges: set[Edge]) -> None:
    """An import within a function may be there for speed. If it closes a cycle, it is listed with its reason, and no other is listed."""
    kept = {edge for edge in edges if edge.kind != FUNCTION or (edge.importer, edge.imported) not in ALLOWED}
    assert cycles(kept) == []
    for pair in ALLOWED:
        assert cycles({*kept, Edge(*pair, FUNCTION)}), f"{pair} closes no cycle"


@pytest.mark.parametrize(
    ("importing", "kind"),
    [
        ("from planted.a import A", MODULE),
        ("import typing\nif typing.TYPE_CHECKING:\n    from planted import (\n        a\n    )", TYPES),
        ("def f():\n    try:\n        import planted.a\n    finally: ...", FUNCTION),
        ("class C:\n    from planted import a", MODULE),
    ],
)
def test_planted_cycles_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, importing: str, kind: str) -> None:
    """A cycle of two modules is closed with the kind of each import."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "__init__.py").touch()
    (tmp_path / "planted" / "a.py").write_text("from planted import b\nclass A: ...\n")
    (tmp_path / "planted" / "b.py").write_text(importing + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cycles(edges_of(tmp_path / "planted")) == [f"planted.a -({MODULE})-> planted.b -({kind})-> planted.a"]
