"""The project's files, as the house tests look at them."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ROOT / "src" / "relight"
SOURCES = sorted(PRODUCT.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "changelog.d").glob("*.md"))]
MADE = {".venv", "build", "dist", "out", "runs", "__pycache__", ".git", ".hypothesis"}


def rel(path: Path) -> str:
    """A source file's name, from the package on."""
    return path.relative_to(PRODUCT).as_posix()


def files() -> list[Path]:
    """What belongs to the project: known to git or about to be; in an unpacked archive, everything that was not made here."""
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        found = [ROOT / name for name in done.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        found = [path for path in ROOT.rglob("*") if not MADE & set(path.relative_to(ROOT).parts)]
    found = sorted(path for path in found if path.is_file())
    assert len(found) > 100, "the project was not found: nothing would be checked"
    return found


def page(name: str) -> str:
    """The text of a page below ``docs``."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")
