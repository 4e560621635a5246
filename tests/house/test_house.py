"""The house rules that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import relight
from relight import errors
from relight.cli import COMMANDS
from relight.observe import EVENTS

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
BROAD_MAY_STAND = {
    "checkpointer/loop.py": "the trainer's edge: event, counter, warning",
    "capture/restore.py": "somebody else's load_state_dict: kept as the cause",
    "capture/loaders.py": "somebody else's loader",
    "capture/walk.py": "somebody else's state_dict",
    "capture/captured.py": "somebody else's state_dict",
    "cli/__init__.py": "the outermost edge of a command: a traceback and exit code 2",
}


def rel(path: Path) -> str:
    return path.relative_to(ROOT / "src" / "relight").as_posix()


@pytest.mark.parametrize("command", [["-c", "import relight"], ["-m", "relight", "--help"], ["-m", "relight", "ls", "--help"]], ids=str)
def test_start_without_torch_and_with_few_modules(command: list[str]) -> None:
    """``import relight`` and commands start without torch, numpy and rich; the bound is a count, not seconds."""
    script = "import sys, atexit; atexit.register(lambda: print('MODULES', len(sys.modules), sorted({'torch', 'numpy', 'rich'} & set(sys.modules))))\n"
    if command[0] == "-c":
        script += command[1]
    else:
        script += f"import runpy; sys.argv = {['relight', *command[2:]]!r}; runpy.run_module('relight', run_name='__main__', alter_sys=True)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    line = next(line for line in done.stdout.splitlines() if line.startswith("MODULES"))
    assert line.endswith("[]"), line
    assert int(line.split()[1]) < 450, line


def test_public_names_are_pinned() -> None:
    """A new public name is a decision, not an accident; each can be imported."""
    assert relight.__all__ == [
        "CheckpointNotFound", "Checkpointer", "ConfigError", "CorruptCheckpoint", "Fenced", "IncompatibleState", "LeaseHeld", "NoSpace",
        "RelightError", "Save", "SaveFailed", "Store", "StoreUnavailable", "UnsafeContent", "WrongKey", "best", "every", "failures",
        "keep", "load", "open", "save",
    ]  # fmt: skip
    assert all(getattr(relight, name) for name in relight.__all__)


def test_every_test_states_its_rule() -> None:
    """Each test function has a docstring."""
    silent = []
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node):
                silent.append(f"{path.name}: {node.name}")
    assert silent == []


def test_every_source_file_says_what_it_is_for_and_stays_small() -> None:
    """A first line, and at most 600 lines."""
    for path in SOURCES:
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), rel(path)
        limit = 700 if rel(path) in ("testing/disks.py", "testing/rules.py") else 600  # one scene or disk after the other
        assert text.count("\n") <= limit, rel(path)


def test_nothing_in_the_source_can_execute_data() -> None:
    """No pickle, marshal, eval, exec, yaml or shell anywhere in the product."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call):
                names = [node.func.id] if isinstance(node.func, ast.Name) else []
                if any(word.arg == "shell" and getattr(word.value, "value", None) for word in node.keywords):
                    found.append(f"{rel(path)}: shell=True")
            found += [f"{rel(path)}: {name}" for name in names if name.split(".")[0] in ("pickle", "marshal", "yaml", "dill", "eval", "exec")]
    assert [one for one in found if not one.startswith("testing/")] == []


def test_broad_excepts_stand_only_at_the_edge() -> None:
    """Each place where anything may be caught is on a short list with its reason."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                kinds = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
                named = [getattr(kind, "id", "") for kind in kinds if kind is not None]
                raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                if node.type is None or "Exception" in named or ("BaseException" in named and not raises):
                    found.add(rel(path))
    assert {one for one in found if not one.startswith(("testing/", "demo/"))} <= BROAD_MAY_STAND.keys()


def test_commands_errors_events_names_and_settings_are_documented() -> None:
    """What users can meet is in the reference or in troubleshooting."""
    text = "\n".join(page.read_text() for page in PAGES)
    kinds = {one.kind for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.RelightError)}
    settings = {name for path in SOURCES for name in re.findall(r"RELIGHT_[A-Z_]+", path.read_text())}
    missing = [name for name in relight.__all__ if name not in text]
    missing += [f"relight {name}" for name in COMMANDS if f"relight {name}" not in text]
    missing += [name for name in (*EVENTS, *settings) if f"`{name}`" not in text and name not in text]
    missing += [kind for kind in kinds - {"relight"} if f"`{kind}`" not in text]
    assert missing == []


def test_links_in_the_docs_lead_somewhere() -> None:
    """Every relative link names a file that is there."""
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_python_in_the_docs_compiles_and_readme_comes_to_the_point() -> None:
    """Code blocks parse; README reaches its example and that one's output within 40 lines."""
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            compile(block, page.name, "exec")
    head = (ROOT / "README.md").read_text().splitlines()[:40]
    assert any("relight.Checkpointer(" in line for line in head)
    assert any("resumed from step" in line for line in head)


def test_notes_have_their_headings() -> None:
    """A note tells problem, decision, alternatives, caveats, tests."""
    for note in (ROOT / "docs" / "notes").glob("[0-9]*.md"):
        for heading in ("Problem", "Decision", "Alternatives", "Caveats", "Tests"):
            assert f"## {heading}" in note.read_text(), (note.name, heading)


def test_no_file_names_a_machine_or_a_registry() -> None:
    """The project speaks of itself alone."""
    words = ["/" + "work/", "/" + "root/", "python" + "hosted", "registry." + "npmjs", "deb." + "debian"]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    for name in listed:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".json", "") and path.is_file() and "golden" not in name:
            text = path.read_text(errors="replace")
            assert not [word for word in words if word in text], name
