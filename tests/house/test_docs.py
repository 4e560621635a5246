"""The pages match the code: they describe everything that users can meet, and nothing else, and their examples work."""

from __future__ import annotations

import ast
import doctest
import importlib
import logging
import re
import tomllib
from pathlib import Path

import pytest
from tree import PAGES, PRODUCT, ROOT, SOURCES, files, page

from relight import errors
from relight.observe import EVENTS
from relight.settings.environment import PROCESS_VARIABLES
from relight.settings.registry import settings_by_variable
from relight.version import VERSION

KINDS = {
    error.kind: name
    for name, error in vars(errors).items()
    if isinstance(error, type) and issubclass(error, errors.RelightError) and error is not errors.RelightError
}


def section(text: str, heading: str) -> str:
    """Return the text below a heading, up to the next heading of its level."""
    match = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"no section {heading!r}"
    return match[1]


def first_cells(text: str) -> list[str]:
    """Return the first column of the tables in ``text``, without headings."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [re.split(r"(?<!\\)\|", row)[1].strip() for row in rows]


def test_every_error_kind_is_in_troubleshooting_next_to_its_error() -> None:
    """Each kind has a row: the kind, its error, its meaning, and what to do. No other kind has one."""
    rows = [
        [cell.strip() for cell in line.split(" | ")]
        for line in page("troubleshooting.md").splitlines()
        if line.startswith("| `")
    ]
    described = {row[0].strip("| `"): row for row in rows}
    assert {
        kind: name for kind, name in KINDS.items() if kind not in described or f"`{name}`" not in described[kind][1]
    } == {}
    assert all(len(row) == 4 and all(cell.strip("| ") for cell in row) for row in rows)
    spoken = {
        match for path in SOURCES for match in re.findall(r"""\bkind = "([a-z_]+)""", path.read_text(encoding="utf-8"))
    }
    assert described.keys() <= KINDS.keys() | spoken


def test_every_symptom_can_be_diagnosed() -> None:
    """``relight doctor --error`` leads to each heading and kind of the troubleshooting page.

    ``tests/doctor`` causes each of them.
    """
    from relight.doctor.complaints import PROGRAM_MESSAGES, USER_DESCRIPTIONS
    from relight.doctor.explain import SYMPTOMS

    text = page("troubleshooting.md")
    headings = {heading.replace('"', "") for heading in re.findall(r"^## (.*)$", text, re.MULTILINE)}
    assert {symptom.section for symptom in (*SYMPTOMS, *PROGRAM_MESSAGES, *USER_DESCRIPTIONS)} == headings | set(
        re.findall(r"^\| `([a-z_]+)` \|", text, re.MULTILINE)
    )


def test_every_setting_is_in_the_reference() -> None:
    """A ``RELIGHT_…`` variable that the source names is a setting, or a variable of the process that the page has."""
    named = {
        name
        for path in SOURCES
        for name in re.findall(r"(?<![A-Z_])RELIGHT_[A-Z]+(?:_[A-Z]+)*(?![A-Z_{])", path.read_text(encoding="utf-8"))
    }
    assert {cell.strip("`") for cell in first_cells(section(page("reference.md"), "Settings"))} == {*PROCESS_VARIABLES}
    assert named <= {*PROCESS_VARIABLES, *settings_by_variable()} and named >= {*PROCESS_VARIABLES}


def test_every_event_is_in_the_reference_with_its_level_and_words() -> None:
    """The page's table of events equals the source's."""
    rows = dict(
        re.findall(r"^\| `([a-z_]+\.[a-z_]+)` (\(.*)\|$", section(page("reference.md"), "Events"), re.MULTILINE)
    )
    assert {
        name: f"({logging.getLevelName(level).lower()}) | {says} " for name, (level, says) in EVENTS.items()
    } == rows


def test_events_that_are_emitted_are_those_of_the_table() -> None:
    """Each emitted event has a row in ``EVENTS``, and each row is emitted."""
    emitted = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            # the callbacks of drain and peers emit what they get
            emits = called == "emit" or (called in ("notify", "_notify") and path.parent.name in ("drain", "peers"))
            if emits and node.args:
                emitted |= {
                    leaf.value
                    for leaf in ast.walk(node.args[0])
                    if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
                }
    assert emitted == EVENTS.keys()


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_lead_somewhere() -> None:
    """Every relative link leads to an existing file, and to an existing heading in it."""
    broken = []
    for here in PAGES:
        for target in re.findall(
            r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", here.read_text(encoding="utf-8"), flags=re.DOTALL)
        ):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = here.parent / name if name else here
            if not file.exists() or (
                anchor
                and anchor
                not in {slug(line) for line in re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)}
            ):
                broken.append(f"{here.name}: {target}")
    assert broken == []


def test_files_and_targets_that_pages_name_are_there() -> None:
    """A proof that is named can be run: ``tests/…`` or ``examples/…`` holds something, ``make …`` is a target, ``relight.…`` and
    ``proofs.…`` import."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    known_files = files()
    missing = []
    for here in PAGES:
        text = here.read_text(encoding="utf-8")
        for name in re.findall(
            r"`((?:proofs|tests|examples|benchmarks|docs|requirements|src|changelog\.d)/[\w./-]*)`", text
        ):
            named = ROOT / name
            if not any(file.is_relative_to(named) for file in known_files):
                missing.append(f"{here.name}: {name}")
        for name in re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE):
            if name not in targets:
                missing.append(f"{here.name}: make {name}")
        for name in re.findall(
            r"(?:`|-m )relight\.((?:testing|demo|capture|observe|format|layout|store|log)(?:\.[a-z_]+)*)", text
        ):
            module = PRODUCT.joinpath(*name.split("."))
            attribute = module.parent / "__init__.py"
            known = attribute.is_file() and re.search(rf"\b{module.name}\b", attribute.read_text(encoding="utf-8"))
            if not (module.is_dir() or module.with_suffix(".py").is_file() or known):
                missing.append(f"{here.name}: relight.{name}")
        for name in re.findall(r"(?:`|-m )proofs\.([a-z_]+)", text):
            if not (ROOT / "proofs" / f"{name}.py").is_file():
                missing.append(f"{here.name}: proofs.{name}")
    assert missing == []


@pytest.mark.parametrize("here", PAGES, ids=lambda path: path.name)
def test_python_in_the_pages_compiles(here: Path) -> None:
    """A block of Python is Python."""
    for block in re.findall(r"```python\n(.*?)```", here.read_text(encoding="utf-8"), re.DOTALL):
        compile(block, here.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_examples_in_docstrings_give_the_output_that_they_show() -> None:
    """Doctests of the package pass; there are some."""
    tried = 0
    for path in SOURCES:
        if ">>> " in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
            failed, count = doctest.testmod(importlib.import_module(name))
            assert failed == 0, name
            tried += count
    assert tried > 0


def test_readme_begins_with_what_a_user_needs() -> None:
    """Installation, maturity and the loop come first. The two commands of the repository follow. All of it fits in 75 lines."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    places = [
        text.index(part)
        for part in (
            "pip install",
            f"Version {VERSION}",
            "relight.Checkpointer(",
            "reports where it resumes",
            "torch.save",
            "## Works with",
            "make demo",
            "make test",
            "docs/tutorial.md",
        )
    ]
    assert places == sorted(places)
    assert len(text.splitlines()) <= 75


def test_the_installation_page_has_each_extra() -> None:
    """The page explains the extras of ``pyproject.toml``, and no others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page("install.md"), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"\w+", row)]
    assert sorted(named) == sorted(project["optional-dependencies"])


def test_figures_are_put_in() -> None:
    """No page has a placeholder ``@NAME@`` for a figure."""
    assert {here.name for here in PAGES if re.search(r"@[A-Z]+@", here.read_text(encoding="utf-8"))} == set()


def test_notes_have_their_headings() -> None:
    """A note has the sections problem, decision, alternatives, caveats and tests, in this order. No two notes have one number."""
    notes = sorted((ROOT / "docs" / "notes").glob("*.md"))
    assert notes
    for note in notes:
        assert re.fullmatch(r"\d{3}-[a-z0-9-]+\.md", note.name), note.name
        headings = re.findall(r"^## (.*)$", note.read_text(encoding="utf-8"), re.MULTILINE)
        assert [
            heading for heading in headings if heading in ("Problem", "Decision", "Alternatives", "Caveats", "Tests")
        ] == [
            "Problem",
            "Decision",
            "Alternatives",
            "Caveats",
            "Tests",
        ], note.name
    assert len({note.name[:3] for note in notes}) == len(notes)
