"""The reference has every command and every option, and no other."""

from __future__ import annotations

import re

import pytest
from tests.cli.reference_page import PAGE, put_in


def test_the_page_has_what_the_commands_state() -> None:
    """Groups, usage lines and options are those of the commands, in the order of ``COMMANDS``: ``make fix`` writes them."""
    text = PAGE.read_text(encoding="utf-8")
    assert put_in(text) == text


def test_a_new_command_gets_a_section_and_one_without_a_command_is_refused() -> None:
    """The generator needs no list of its own."""
    text = PAGE.read_text(encoding="utf-8")
    without = re.sub(r"^## relight tag\n.*?(?=^## )", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "`relight tag [OPTIONS]" not in without and "`relight tag [OPTIONS]" in put_in(without)
    with pytest.raises(SystemExit, match="nothing"):
        put_in(text + "## relight nothing\n\nText.\n")


def test_outputs_in_the_reference_can_be_read_on_a_page() -> None:
    """Documented outputs are as wide as in a pipe, at most 84 columns."""
    blocks = re.findall(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    assert [line for block in blocks for line in block.splitlines() if len(line) > 84] == []
