"""Fixtures of these tests: ``at_hand``, and a store that is made once and copied for each test."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from at_hand import Answer, fill, in_process


@pytest.fixture(scope="session")
def _template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    fill(root / "runs")
    return root / "runs"


@pytest.fixture
def runs(_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of two runs in the working directory: ``demo`` with four checkpoints, ``baseline`` with one."""
    shutil.copytree(_template, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def relight(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """The command line in this process: ``relight("ls", "runs")`` gives its answer."""
    monkeypatch.delenv("RELIGHT_DEBUG", raising=False)

    def call(*arguments: object) -> Answer:
        return in_process(monkeypatch, capfd, [str(argument) for argument in arguments])

    return call
