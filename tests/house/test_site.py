"""The pages as a site: all of them are in it, each link leads somewhere, and nothing is asked of anybody else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Strict: a page that is in no chapter, or a link or a heading that is not there, ends it. No font, script or picture comes from elsewhere."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")], cwd=ROOT, text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    asked = set()
    for page in (tmp_path / "site").rglob("*.html"):
        asked |= set(
            re.findall(r"<(?:script|link|img)\b[^>]*?(?:src|href)=\"(https?:[^\"]+)", page.read_text(encoding="utf-8"))
        )
    assert asked == set()
    assert (tmp_path / "site" / "tutorial" / "index.html").is_file()
