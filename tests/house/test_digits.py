"""Digits that ``int`` refuses, such as ``²``, are refused like any other text: ``str.isdigit`` accepts them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import relight
from relight.cli.export import averaged
from relight.cli.import_ import _part
from relight.config.check import _parted
from relight.errors import ConfigError
from relight.simulator.read import put
from relight.supervise.launch import _static


def test_superscript_digits() -> None:
    """Each reader of text with a number names the text, and does not raise ``ValueError``."""
    assert _parted("file:²:1") == ("file:²:1", 0, 0)
    assert _part("tensors, ² bytes") == "tensors, ² bytes"
    endpoint: Any = SimpleNamespace(backend="static", endpoint="host:²")
    opened: Any = None
    for call in (
        lambda: _static(endpoint),
        lambda: averaged(opened, "last:²", None),
        lambda: put({"a": [{}]}, "a.².b", 1),
    ):
        with pytest.raises(ConfigError):
            call()


def test_each_isdigit_is_of_ascii() -> None:
    """A text that is passed to ``int`` is checked by ``isdecimal``, or must be ASCII."""
    allowed = {"arena/memory.py", "format/names.py", "policy/triggers.py"}  # an ASCII file; two that need no number
    root = Path(relight.__file__).parent
    lines = [
        (path.relative_to(root).as_posix(), line)
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\.isdigit\(", line)
    ]
    assert [entry for entry in lines if entry[0] not in allowed and "isascii" not in entry[1]] == []
