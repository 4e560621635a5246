"""Hook of ``make site``: add the results to the site, and point the pages' links to them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parent / "results"
LINK = re.compile(r"\]\((?:\.\./)+benchmarks/results/([\w.-]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add each result as a file of the site."""
    for path in sorted(RESULTS.iterdir()):
        if path.suffix in (".json", ".png", ".md"):
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links into the tree become links into the site."""
    up = "../" * page.file.src_uri.count("/")
    return LINK.sub(rf"]({up}results/\1", markdown)
