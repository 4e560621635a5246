"""Run each snippet of the guides. A snippet that is not run states the reason, and its names and commands are checked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from paste import Block, blocks, defined, follow, pattern, steps, unknown_commands, unknown_names
from tests.store.servers import make_bucket, moto
from tree import ROOT

DOCS = ROOT / "docs"
QUICK = [
    "comparison.md", "guides/one-gpu.md", "guides/partial-restore.md", "guides/notebooks.md", "guides/configs.md", "guides/encryption.md", "guides/storing-less.md",
    "guides/data.md", "guides/store-back-end.md", "guides/from-deepspeed.md", "guides/from-megatron.md", "guides/from-transformers.md",
    "guides/tiers.md", "guides/following.md", "guides/retention.md",
]  # fmt: skip
SLOW = [
    "concepts.md", "guides/one-node.md", "guides/ray.md", "guides/from-dcp.md", "guides/from-lightning.md", "guides/from-orbax.md",
    "guides/from-torch-save.md", "guides/many-ranks.md",
]  # fmt: skip
BUCKET = "guides/s3.md"
CODEC = "guides/chunk-codec.md"
"""Its package must be installed: see its test."""


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.timeout(300)
def test_a_guide_gives_the_output_that_it_shows(name: str, tmp_path: Path) -> None:
    """All of its snippets, one after the other, in an empty directory."""
    follow(DOCS / name, tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", SLOW)
@pytest.mark.timeout(600)
def test_a_longer_guide_gives_the_output_that_it_shows(name: str, tmp_path: Path) -> None:
    """The same of guides that take longer, some with jobs of several ranks."""
    follow(DOCS / name, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_guide_to_buckets_gives_the_output_that_it_shows(tmp_path: Path) -> None:
    """The same with a server that speaks as S3 does, in which the page's bucket is."""
    (tmp_path / "server").mkdir()
    with moto(tmp_path / "server") as server:
        make_bucket(server, "my-bucket")
        (tmp_path / "here").mkdir()
        follow(DOCS / BUCKET, tmp_path / "here", server.environment)


@pytest.mark.parametrize("name", [*QUICK, *SLOW, BUCKET, CODEC])
def test_snippets_are_run_or_state_the_reason(name: str) -> None:
    """Only Python, JSON, TOML and consoles are code; what is not run gives a reason of some words; names, commands and options are there."""
    for block in blocks(DOCS / name):
        assert block.kind in ("python", "console", "json", "toml", "text"), (
            f"{name}: a block of {block.kind or 'no language'}"
        )
        assert not block.why_not or len(block.why_not.split()) > 3, f"{name}: why is it not run?"
        if block.kind == "python":
            compile(block.text, name, "exec")
            assert unknown_names(block) == [], name
        elif block.kind == "json":
            json.loads(block.text)
        elif block.kind == "toml":
            tomllib.loads(block.text)
        elif block.kind == "console":
            assert steps(block), f"{name}: a console without a command"
            assert unknown_commands(block.text) == [], name


@pytest.mark.timeout(300)
def test_the_guide_to_codecs_gives_the_output_that_it_shows(tmp_path: Path) -> None:
    """Its codec is registered by the page's own entry point. Without the package, an error names the missing codec."""
    page, package = DOCS / CODEC, tmp_path / "package"
    script, metadata = blocks(page)[0], tomllib.loads(blocks(page)[1].text)["project"]
    info = package / "zlib_codec-1.0.dist-info"
    info.mkdir(parents=True)
    (package / "zlib_codec.py").write_text(script.text)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {metadata['name']}\nVersion: {metadata['version']}\n")
    [(group, entries)] = metadata["entry-points"].items()
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *(f"{k} = {v}" for k, v in entries.items())]))
    (tmp_path / "here").mkdir()
    printed = follow(
        page, tmp_path / "here", {"PYTHONPATH": f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    )
    assert "zlib" in printed[1]
    command = [sys.executable, "-m", "relight", "verify", "runs/demo"]
    without = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True)
    assert without.returncode != 0 and "needs codecs that are not installed: zlib" in without.stdout + without.stderr


def test_each_guide_of_a_framework_is_followed() -> None:
    """A new page on moving over is in one of the lists above."""
    assert {f"guides/{path.name}" for path in (DOCS / "guides").glob("from-*.md")} == {
        name for name in [*QUICK, *SLOW] if "/from-" in name
    }


def test_the_checks_of_snippets_can_fail(tmp_path: Path) -> None:
    """Missing names, commands and options, other output, and a script without a name are all detected."""
    assert unknown_names(Block("python", "import relight\nrelight.Chekpointer()\n")) == ["relight.Chekpointer"]
    assert unknown_names(Block("python", "from relight.integrations.dcp import Nothing\n")) == [
        "relight.integrations.dcp.Nothing"
    ]
    assert unknown_names(Block("python", "from relight.integrations.lightning import LightningCheckpoints\n")) == []
    assert unknown_commands(
        "$ relight lss runs\n$ relight ls runs --colour\n$ A=1 relight keys nwe f\n$ relight ls --json runs | wc"
    ) == [
        "relight lss",
        "relight ls --colour",
        "relight keys  nwe f",
    ]
    assert "Checkpointer" in defined(ROOT / "src" / "relight" / "checkpointer" / "checkpointer.py")
    assert re.fullmatch(pattern("a … b\n…\nc\n"), "a 1 b\nx\ny\nc\n") and not re.fullmatch(pattern("a\n"), "b\n")
    page = tmp_path / "page.md"
    for text in ("```console\n$ echo other\nthis\n```\n", "```console\n$ false\n```\n", "```python\nprint()\n```\n"):
        page.write_text(text)
        with pytest.raises(AssertionError):
            follow(page, tmp_path)
    page.write_text(
        "<!-- needs: no_such_module -->\n```console\n$ false\n```\n<!-- no-run: it would take too long -->\n```console\n$ false\n```\n"
    )
    assert follow(page, tmp_path) == []
