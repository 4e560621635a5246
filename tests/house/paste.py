"""Run a page's snippets in order in an empty directory, as a reader would, and compare their output with the page.

A block of Python with the first line ``# name.py`` becomes that file. A block of ``console`` has commands after ``$ `` and their
output below them (``…`` matches any text, on its own line any number of lines). Comments above a block, invisible to readers:

``<!-- needs: MODULE -->``: the block runs only if MODULE is installed; otherwise only its names are checked.
``<!-- no-run: WHY -->``: only its names are checked.
``<!-- given: PATH = NAME -->``, anywhere: copy PATH below ``tests/importers/golden`` to NAME.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from tree import PRODUCT, ROOT

import relight
from relight.cli import COMMANDS, cli, form_of

GOLDEN = ROOT / "tests" / "importers" / "golden"


@dataclass(frozen=True)
class Block:
    """A code block of a page: its language, its text, and the comment above it."""

    kind: str
    text: str
    needs: str = ""
    why_not: str = ""

    def runs(self) -> bool:
        """Return whether the block runs here."""
        return not self.why_not and (not self.needs or importlib.util.find_spec(self.needs) is not None)


def blocks(page: Path) -> list[Block]:
    """Return all code blocks of a page in order."""
    result = re.finditer(
        r"(?:^<!-- (needs|no-run): (.+?) -->\n)?^```(\w*)\n(.*?)^```$",
        page.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    return [
        Block(kind, text, argument if way == "needs" else "", argument if way == "no-run" else "")
        for way, argument, kind, text in (m.groups() for m in result)
    ]


def steps(block: Block) -> list[tuple[str, str]]:
    """Return each command of a console block with its output."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


VARYING = (
    (re.compile(r"\b\d+(?:\.\d+)? (?:ms|s|min|h|kB|MB)\b(?: ago)?|\bjust now\b"), "TIME"),
    (re.compile(r"\b\d+\.\d+(?:e-?\d+)?\b|\b\d{4,9}\b"), "N"),
    (re.compile(r"\b[a-z0-9]{10}\b"), "ID"),
    (re.compile(r"\b[0-9a-f]{6}\b"), "N"),  # of an incident; all its characters may be digits
    (re.compile(r" +"), " "),
)
"""What differs between two runs of a whole output: times, measured numbers, ids, and the widths of columns."""


def masked(text: str) -> str:
    """Return a text without what differs between two runs."""
    for varying, name in VARYING:
        text = varying.sub(name, text)
    return text


def pattern(output: str) -> str:
    """Return the pattern that matches the page's output."""
    lines = [
        r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n"
        for line in output.splitlines()
    ]
    return "".join(lines)


def fits(printed: str, page: str) -> bool:
    """Return whether an output is the page's.

    Lines of ranks begin with ``[RANK] ``. They come through other pipes than the lines of ``relight run``, so only the order of the
    ranks' lines, and of the others, is compared.
    """
    others, of_ranks = (
        [line for line in page.splitlines(keepends=True) if is_rank(line) == each] for each in (False, True)
    )
    if "…\n" in others:
        of_ranks = ["…\n", *(part for line in of_ranks for part in (line, "…\n"))]
    lines = printed.splitlines(keepends=True)
    return all(
        re.fullmatch(pattern("".join(shown)), "".join(line for line in lines if is_rank(line) == each)) is not None
        for shown, each in ((others, False), (of_ranks, True))
    )


def is_rank(line: str) -> bool:
    """Return whether a line of ``relight run`` is a rank's."""
    return re.match(r"\[\d+\] ", line) is not None


def environment() -> dict[str, str]:
    """Return the environment of snippets: this Python's commands first, a fixed width, and only warnings of Relight.

    Pages show only the script's own output.
    """
    here = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{here}:{os.environ['PATH']}",
        "RELIGHT_BACKGROUND": "1",
        "RELIGHT_LOG": "warnings",
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }


def give(page: Path, folder: Path) -> None:
    """Copy the files that the page expects."""
    for source, name in re.findall(r"^<!-- given: (\S+) = (\S+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE):
        origin = GOLDEN / source
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if origin.is_dir():
            shutil.copytree(origin, folder / name)
        else:
            shutil.copy(origin, folder / name)


def save(block: Block, folder: Path) -> None:
    """Write a script of the page to the file that it names."""
    name = re.match(r"# ([\w-]+\.py)\n", block.text)
    assert name is not None, (
        f"Python that is run names its file in the first line, or states why it is not run:\n{block.text}"
    )
    (folder / name[1]).write_text(block.text, encoding="utf-8")


def follow(page: Path, folder: Path, more: Mapping[str, str] | None = None, *, whole: bool = False) -> list[str]:
    """Run the page's snippets in ``folder`` and return each command's output.

    Fail if output differs or an exit code is not 0. ``whole``: the page shows whole outputs, and what varies is masked.
    """
    shown = masked if whole else str
    give(page, folder)
    printed = []
    for block in (block for block in blocks(page) if block.runs()):
        if block.kind == "python":
            save(block, folder)
        for command, output in steps(block) if block.kind == "console" else []:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env={
                    **environment(),
                    "PYTHONUNBUFFERED": "1",
                    **(more or {}),
                },  # as in a terminal: lines in their order
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            printed_now = re.sub(r"bash: line 1: +\d+ (?:Killed|Aborted) .*\n", "", done.stdout)
            assert fits(shown(printed_now), shown(output)), (
                f"{page.name}: $ {command}\n{printed_now}\n-- the page:\n{output}"
            )
            assert done.returncode == 0, (page.name, command, printed_now)
            printed.append(printed_now)
    return printed


def unknown_names(block: Block) -> list[str]:
    """Return names of Relight that a Python block uses and that do not exist.

    Plug-ins are checked by source: their frameworks may be missing.
    """
    unknown = []
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "relight":
            path = PRODUCT.joinpath(*str(node.module).split(".")[1:])
            source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            known = defined(source) if source.is_file() else set()
            unknown += [f"{node.module}.{name.name}" for name in node.names if name.name not in known]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "relight":
            unknown += [f"relight.{node.attr}"] if not hasattr(relight, node.attr) else []
    return unknown


def defined(source: Path) -> set[str]:
    """Return the names that a module defines at its top level."""
    names = set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {name.asname or name.name for name in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names |= {
                leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Store)
            }
    return names


def unknown_commands(text: str) -> list[str]:
    """Return commands and options of Relight in a shell's text that do not exist."""
    unknown = []
    for name, rest in re.findall(r"(?:^|[;|&] *|\$ |\w=\S+ )relight ([a-z]+)([^;|&#\n]*)", text, re.MULTILINE):
        if name not in COMMANDS:
            unknown.append(f"relight {name}")
            continue
        form, arguments = form_of(name, rest.split())
        command = cli.get_command(None, form)  # type: ignore[arg-type]
        if isinstance(command, click.Group):
            inner = command.commands.get((arguments or [""])[0])
            if inner is None:
                unknown.append(f"relight {name} {rest}")
                continue
            command = inner
        options = {opt for parameter in command.params for opt in parameter.opts} if command is not None else set()
        if name not in ("run", "drill"):  # further options belong to torchrun or to a script
            named = re.findall(r"(?<= )--[a-z-]+", f" {' '.join(arguments)}")
            unknown += [f"relight {form} {option}" for option in named if option not in options]
    return unknown
