"""A page's snippets, pasted one after the other into an empty directory, as a reader would; what they print is what the page says.

A block of Python whose first line is ``# name.py`` becomes that file. A block of ``console`` has commands behind ``$ ``, and what they print
below them (``…`` is anything, on a line of its own any number of lines). What is said in a comment above a block, which readers do not see:

``<!-- needs: MODULE -->`` it runs where MODULE is installed, and is only looked at elsewhere; ``<!-- no-run: WHY -->`` it is only looked at.
``<!-- given: PATH = NAME -->``, anywhere, puts what lies at PATH below ``tests/importers/golden`` there as NAME.
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
from relight.cli import COMMANDS, cli

GOLDEN = ROOT / "tests" / "importers" / "golden"


@dataclass(frozen=True)
class Block:
    """One piece of code of a page: its language, its text, and what is said above it."""

    kind: str
    text: str
    needs: str = ""
    why_not: str = ""

    def runs(self) -> bool:
        """Is it to be run, here?"""
        return not self.why_not and (not self.needs or importlib.util.find_spec(self.needs) is not None)


def blocks(page: Path) -> list[Block]:
    """All code of a page, in its order."""
    found = re.finditer(
        r"(?:^<!-- (needs|no-run): (.+?) -->\n)?^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return [
        Block(kind, text, said if way == "needs" else "", said if way == "no-run" else "")
        for way, said, kind, text in (m.groups() for m in found)
    ]


def steps(block: Block) -> list[tuple[str, str]]:
    """Each command of a console, and what it prints."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


def pattern(output: str) -> str:
    """What fits the output on the page."""
    lines = [r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n" for line in output.splitlines()]
    return "".join(lines)


def environment() -> dict[str, str]:
    """In which snippets run: the commands of this Python first, lines of one width, and no lines of Relight's but warnings: pages show what
    a script prints itself."""
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
    """What the page takes to be there."""
    for source, name in re.findall(r"^<!-- given: (\S+) = (\S+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE):
        there = GOLDEN / source
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if there.is_dir():
            shutil.copytree(there, folder / name)
        else:
            shutil.copy(there, folder / name)


def save(block: Block, folder: Path) -> None:
    """A script of the page, as the file that it names."""
    name = re.match(r"# ([\w-]+\.py)\n", block.text)
    assert name is not None, f"Python that is run names its file in the first line, or says why it is not run:\n{block.text}"
    (folder / name[1]).write_text(block.text, encoding="utf-8")


def follow(page: Path, folder: Path, more: Mapping[str, str] | None = None) -> list[str]:
    """Do all that the page says, there; what each command printed. Output that differs fails, and so does an exit code but 0."""
    give(page, folder)
    printed = []
    for block in (one for one in blocks(page) if one.runs()):
        if block.kind == "python":
            save(block, folder)
        for command, output in steps(block) if block.kind == "console" else []:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env={**environment(), **(more or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            said = re.sub(r"bash: line 1: +\d+ (?:Killed|Aborted) .*\n", "", done.stdout)
            assert re.fullmatch(pattern(output), said), f"{page.name}: $ {command}\n{said}\n-- the page:\n{output}"
            assert done.returncode == 0, (page.name, command, said)
            printed.append(said)
    return printed


def unknown_names(block: Block) -> list[str]:
    """Names of Relight's that a block of Python uses and that are not there; of plug-ins by their source, as their frameworks may be missing."""
    found = []
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "relight":
            path = PRODUCT.joinpath(*str(node.module).split(".")[1:])
            source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            known = defined(source) if source.is_file() else set()
            found += [f"{node.module}.{one.name}" for one in node.names if one.name not in known]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "relight":
            found += [f"relight.{node.attr}"] if not hasattr(relight, node.attr) else []
    return found


def defined(source: Path) -> set[str]:
    """What a module has at its top."""
    names = set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {one.asname or one.name for one in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names |= {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Store)}
    return names


def unknown_commands(text: str) -> list[str]:
    """Commands of Relight's in a shell's text that are not there, and options that they do not have."""
    found = []
    for name, rest in re.findall(r"(?:^|[;|&] *|\$ |\w=\S+ )relight ([a-z]+)([^;|&#\n]*)", text, re.MULTILINE):
        if name not in COMMANDS:
            found.append(f"relight {name}")
            continue
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        if isinstance(command, click.Group):
            inner = command.commands.get((rest.split() or [""])[0])
            if inner is None:
                found.append(f"relight {name} {rest}")
                continue
            command = inner
        options = {one for parameter in command.params for one in parameter.opts} if command is not None else set()
        if name not in ("run", "prove", "drill"):  # what is behind these belongs to torchrun, or to a script
            found += [f"relight {name} {one}" for one in re.findall(r"(?<= )--[a-z-]+", rest) if one not in options]
    return found
