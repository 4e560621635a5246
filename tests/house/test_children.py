"""Every Python process that Relight starts is started by one function, which keeps the working directory off its path."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.house.tree import ENGINES, SOURCES, rel

BUILDER = "comm/children.py"
ALLOWED = {
    "cli/__init__.py": ({"sys.executable"}, "names the interpreter in a message"),
}
"""Other files that may use a name, and for what."""
_NAMES = {"sys.executable", "sys._base_executable", "sys.orig_argv"}
_WORDS = {"PYTHON_EXEC", "python", "python3"}
_STARTS = {
    "Popen",
    "run",
    "call",
    "check_call",
    "check_output",
    "execv",
    "execve",
    "execvp",
    "posix_spawn",
    "create_subprocess_exec",
}
_POOLS = {"Pool", "ProcessPoolExecutor", "Manager", "SharedMemory"}
_SPAWNS = {"submit", "start"}


def uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each way to an interpreter: its path, the word "python" in a command, a spawn outside of ``safe_spawn``."""
    if not any(
        word in source
        for word in ("executable", "orig_argv", "spawn", "forkserver", "python", "PYTHON_EXEC", "sys.path[", *_POOLS)
    ):
        return  # parsing the whole package takes seconds
    tree = ast.parse(source)
    spawns = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Module) and _spawns(node, tree)]
    spawning = {id(node) for function in spawns for node in ast.walk(function)}
    safe = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.With) and _is_safe(block)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := ast.unparse(node)) in _NAMES:
            yield node.lineno, name
        if isinstance(node, ast.Assign) and any(
            ast.unparse(target).startswith("sys.path[0]") for target in node.targets
        ):
            yield node.lineno, "sys.path[0] of a child is no script's directory: enter_script"
        if isinstance(node, ast.ImportFrom) and node.module == "sys":
            yield from ((node.lineno, f"sys.{name.name}") for name in node.names if f"sys.{name.name}" in _NAMES)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _STARTS:
            constants = [
                leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
            ]
            yield from ((node.lineno, text) for text in constants if text.rpartition("/")[2] in _WORDS)
        if isinstance(node, ast.Call) and id(node) not in safe:
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in _POOLS or (id(node) in spawning and called in _SPAWNS):
                yield node.lineno, "spawn"


def _spawns(node: ast.FunctionDef | ast.Module, tree: ast.Module) -> bool:
    """Whether a function, or the statements of a module without functions, names a way of multiprocessing that starts an interpreter."""
    if isinstance(node, ast.Module) and any(isinstance(child, ast.FunctionDef) for child in ast.walk(tree)):
        return False
    return any(isinstance(child, ast.Constant) and child.value in ("spawn", "forkserver") for child in ast.walk(node))


def _is_safe(block: ast.With) -> bool:
    return any(
        isinstance(item.context_expr, ast.Call) and ast.unparse(item.context_expr.func) == "safe_spawn"
        for item in block.items
    )


def test_one_function_builds_every_command_of_a_python_process() -> None:
    """No other file of the package or of its proofs uses the interpreter's path, or spawns with multiprocessing outside of ``safe_spawn``."""
    violations = []
    for file in [*SOURCES, *ENGINES]:
        path = rel(file)
        allowed = ALLOWED.get(path, (set(), ""))[0]
        violations += [
            f"{path}:{line}: {name}" for line, name in uses(file.read_text()) if path != BUILDER and name not in allowed
        ]
    assert not violations, "use relight.comm.children: " + ", ".join(violations)


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nprogram = sys.executable",
        "from sys import executable",
        "import sys\nsys.path[0] = '.'",
        "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor(2)",
        "import subprocess\nsubprocess.run(['/usr/bin/python3', 'x.py'])",
        'import multiprocessing\nmultiprocessing.get_context("spawn").Process(target=print).start()',
    ],
)
def test_each_way_to_an_interpreter_is_found(source: str) -> None:
    """The check above has teeth."""
    assert list(uses(source))
