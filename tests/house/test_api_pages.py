"""The pages of docs/api have every public name, and its docstring describes each parameter."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import griffe
import pytest
from tree import ROOT

import relight

PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
BLOCK = re.compile(r"^::: relight\.(\S+)\n((?:    .*\n)*)", re.MULTILINE)


@cache
def package() -> Any:
    """Return the package as mkdocstrings reads it: from the source, without importing it."""
    return griffe.load("relight", search_paths=[str(ROOT / "src")], resolve_aliases=True)


def blocks() -> dict[str, str]:
    """Return the options of each name that a page shows."""
    return {name: options for page in PAGES for name, options in BLOCK.findall(page.read_text(encoding="utf-8"))}


def target_of(name: str) -> Any:
    """Return the object of a public name."""
    value = package()[name]
    return value.final_target if value.is_alias else value


def callables(name: str, options: str) -> list[Any]:
    """Return the function, or the class and its shown methods, of a block."""
    value = target_of(name)
    if value.is_function:
        return [value]
    if not value.is_class:
        return []
    shown = re.search(r"members: (?:\[(.*)\]|false)", options)
    names = value.members if shown is None else (shown[1] or "").split(", ")
    methods = [value.members[each] for each in names if each in value.members and not each.startswith("_")]
    own = [] if "merge_init_into_class: false" in options else [value]
    return [*own, *(each for each in methods if not each.is_alias and each.is_function)]


def test_every_public_name_has_a_block() -> None:
    """A name in ``relight.__all__`` is on exactly one page."""
    shown = [name for page in PAGES for name, _ in BLOCK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(name for name in shown if "." not in name) == sorted(relight.__all__)
    assert len(shown) == len(set(shown))


@pytest.mark.parametrize(("name", "options"), blocks().items(), ids=list(blocks()))
def test_each_parameter_is_described(name: str, options: str) -> None:
    """A public function describes its parameters under ``Args``, and has a type for each; a block shows an object, not a module."""
    value = target_of(name)
    assert not value.is_module, "its home is a module of the same name: name the object in it, with heading="
    assert value.docstring is not None
    for shown in callables(name, options):
        sections = shown.docstring.parse("google")
        described = {
            each.name.lstrip("*")
            for section in sections
            if section.kind.value == "parameters"
            for each in section.value
        }
        parameters = [each for each in shown.parameters if each.name not in ("self", "cls")]
        assert {each.name for each in parameters} == described, shown.path
        assert all(each.annotation is not None for each in parameters), shown.path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_page_begins_with_an_example(page: Any) -> None:
    """Below the title, and a line for those who read the file, there is a block of Python."""
    assert re.match(r"# .+\n\n(?:Descriptions replace .+\n\n)?```python\nimport ", page.read_text(encoding="utf-8"))
