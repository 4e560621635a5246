"""The project's files, for the house tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ROOT / "src" / "relight"
PROOFS = ROOT / "proofs"
SOURCES = sorted(PRODUCT.rglob("*.py"))
ENGINES = sorted(PROOFS.rglob("*.py"))
"""The files of ``proofs``: the rules of the source hold for them, too."""
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "changelog.d").glob("*.md")),
]
MADE = {".venv", "build", "dist", "out", "runs", "__pycache__", ".git", ".hypothesis"}


def rel(path: Path) -> str:
    """Return a source file's path in the package, or that of a proof engine in the repository."""
    return path.relative_to(PRODUCT if path.is_relative_to(PRODUCT) else ROOT).as_posix()


def files() -> list[Path]:
    """Return the project's files: tracked by git, or untracked and not ignored; in an unpacked archive, all files except build outputs."""
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        paths = [ROOT / name for name in done.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for path in ROOT.rglob("*") if not MADE & set(path.relative_to(ROOT).parts)]
    paths = sorted(path for path in paths if path.is_file())
    assert len(paths) > 100, "the project was not found: nothing would be checked"
    return paths


def page(name: str) -> str:
    """The text of a page below ``docs``."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")
