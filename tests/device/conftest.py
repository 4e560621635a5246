"""Tests on an accelerator: saves run in the agent, and cuBLAS gives equal results in equal runs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELIGHT_BACKGROUND", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
