"""Move rooms and files of the package, and rewrite every reference to them.

    rename_files.py ROOT TABLE

Each line of TABLE: ``old new``, paths below ``src/relight``: a folder, or a file that ends in ``.py``. Dotted module names and paths are
rewritten in all tracked text files; names that ``from package import module`` binds are rewritten by the syntax tree.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = "src/relight"
KEPT = ("docs/notes/040-plain-words.md", "tools/", "CHANGELOG.md", "tests/golden/")
"""What names the old paths on purpose."""


def texts(root: Path) -> list[Path]:
    """Return the tracked text files that may hold references."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    kinds = {".py", ".md", ".toml", ".yml", ".yaml", ".html", ".js", ".sh", ".sbatch"}
    return [
        root / name
        for name in names
        if name and not name.startswith(KEPT) and (Path(name).suffix in kinds or name == "Makefile") and (root / name).is_file()
    ]


def dotted(path: str) -> str:
    """Return the module's name below the package."""
    return path.removesuffix(".py").replace("/", ".")


def bound_names(source: str, package: str, module: str, new: str) -> str:
    """Rewrite ``module`` where ``from package import module`` binds it, and each use of it."""
    tree = ast.parse(source)
    places: list[tuple[int, int]] = []
    bound = False
    lines = source.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            for alias in node.names:
                if alias.name == module:
                    places.append((alias.lineno, alias.col_offset))
                    bound |= alias.asname is None
    if not places:
        return source
    if bound:
        places += [(node.lineno, node.col_offset) for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == module]
    for line, column in sorted(set(places), reverse=True):
        text = lines[line - 1].encode()
        assert text[column:].startswith(module.encode()), (line, column, module)
        lines[line - 1] = (text[:column] + new.encode() + text[column + len(module.encode()) :]).decode()
    return "\n".join(lines)


def main(root: Path, table: Path) -> None:
    """Do all moves of the table, one after the other."""
    moves = [line.partition("#")[0].split() for line in table.read_text().splitlines()]
    moves = [move for move in moves if move]
    rooms = {old: new for old, new in moves if not old.endswith(".py")}
    for old, new in moves:
        room, slash, rest = old.partition("/")
        if slash:  # its room was moved before
            old = f"{rooms.get(room, room)}/{rest}"
            new_room, _, new_rest = new.partition("/")
            new = f"{rooms.get(new_room, new_room)}/{new_rest}"
        (root / PACKAGE / new).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", f"{PACKAGE}/{old}", f"{PACKAGE}/{new}"], cwd=root, check=True)
        before, after = f"relight.{dotted(old)}", f"relight.{dotted(new)}"
        package, _, module = before.rpartition(".")
        new_package, _, new_module = after.rpartition(".")
        name = re.compile(rf"(?<![\w.]){re.escape(before)}(?!\w)")
        path = re.compile(rf"(?<![\w]){re.escape(old)}(?![\w])" if old.endswith(".py") else rf"(?<=relight/){re.escape(old)}(?=/)|(?<=[\"'`]){re.escape(old)}/(?=\w+\.py)")
        start = root / PACKAGE / Path(new).parent / "__init__.py"
        exported = start.is_file() and re.search(rf"^from \S+ import .*\b{module}\b|^    .*\b{module},", start.read_text(encoding="utf-8"), re.MULTILINE)
        count = 0
        for file in texts(root):
            text = old_text = file.read_text(encoding="utf-8")
            if module not in text and old not in text:
                continue
            if file.suffix == ".py" and not exported:
                text = bound_names(text, package, module, new_module)
                if package != new_package:
                    text = re.sub(rf"from {re.escape(package)} import {new_module}\b", f"from {new_package} import {new_module}", text)
            text = name.sub(after, text)
            text = path.sub(lambda match: new + ("/" if match[0].endswith("/") else ""), text)
            if text != old_text:
                file.write_text(text, encoding="utf-8")
                count += 1
        print(f"{old} -> {new}: {count} files", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
