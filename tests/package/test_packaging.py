"""A small part of ``make package``: builds are reproducible, contents are right, and a difference is detected."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest
from make_package import Wrong, bill, build, canonical, interpreters, pins, same, tracked

ROOT = Path(__file__).parents[2]
EPOCH = "1700000000"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this tree."""
    (built,) = build(ROOT, tmp_path_factory.mktemp("first"), "wheel", SOURCE_DATE_EPOCH=EPOCH)
    return built


def test_a_wheel_built_again_under_other_circumstances_has_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    """Neither the time of the build nor zone, locale or order of hashes is in it."""
    again = build(ROOT, tmp_path, "wheel", SOURCE_DATE_EPOCH=EPOCH, TZ="Asia/Kathmandu", LC_ALL="C", PYTHONHASHSEED="7")
    same([wheel], again)


def test_what_differs_is_named(wheel: Path, tmp_path: Path) -> None:
    """One different byte in one file of a wheel is detected, and the file is named."""
    other = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as original, zipfile.ZipFile(other, "w") as changed:
        for member in original.infolist():
            changed.writestr(member, original.read(member) + (b"#" if member.filename == "relight/errors.py" else b""))
    with pytest.raises(Wrong, match="relight/errors.py"):
        same([wheel], [other])


def test_the_wheel_has_licence_types_entry_point_and_no_test(wheel: Path) -> None:
    """The wheel has what users, their type checkers and lawyers need, and no test."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        headers = archive.read(metadata).decode()
        entry = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    assert "relight/py.typed" in names
    assert metadata.replace("METADATA", "licenses/LICENSE") in names
    assert "License-Expression: Apache-2.0" in headers
    assert "relight = relight.cli:main" in entry
    assert {name.split("/")[0].split("-")[0] for name in names} == {"relight"}


def test_the_wheel_has_tools_for_authors_of_stores_and_codecs_and_no_proof_engine(wheel: Path) -> None:
    """The tools are those of the guides to store back ends and chunk codecs. A new one is a decision; a proof engine belongs in ``proofs``."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name.removeprefix("relight/testing/") for name in archive.namelist() if "/testing/" in name}
    assert names == {
        "__init__.py", "codec_suite.py", "counting.py", "disks.py", "killable_store.py", "scenario.py", "store_suite.py",
        "traced_writes.py",
    }  # fmt: skip
    assert not names & {path.name for path in (ROOT / "proofs").glob("[a-z]*.py")}


def test_pages_that_packages_are_judged_by_are_there_and_linked() -> None:
    """Licence, changelog, how to contribute, how to report: in the tree, in what is packed, and found from README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        assert (ROOT / name).stat().st_size > 100
        assert f"]({name})" in readme


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not in a checkout")
def test_only_files_that_are_there_and_known_are_compared() -> None:
    """Git's list includes this project's files, and no environment or build."""
    known = tracked()
    assert "src/relight/py.typed" in known
    assert not [name for name in known if name.startswith((".venv/", "build/", "dist/"))]


def test_a_bill_counts_hashes_by_component() -> None:
    """CycloneDX has one reference for each file of a release. A component without hashes counts 0."""
    reference = {"url": "x", "hashes": [{"alg": "SHA-256", "content": "0"}]}
    parts = [
        {"name": "A.b", "version": "1", "externalReferences": [reference, reference]},
        {"name": "c", "version": "2"},
    ]
    assert bill(json.loads(json.dumps({"components": parts}))) == {"a-b": ("1", 2), "c": ("2", 0)}
    assert canonical("Ruamel_yaml.Clib") == "ruamel-yaml-clib"
    assert pins("torch.txt")["torch"].count(".") == 2


def test_an_interpreter_that_was_asked_for_and_is_not_there_is_an_error() -> None:
    """Pythons that were not asked for may be absent."""
    own = interpreters([sys.executable])
    assert list(own) == [f"{sys.version_info.major}.{sys.version_info.minor}"]
    with pytest.raises(Wrong, match="python2.95"):
        interpreters(["python2.95"])


def test_the_tools_of_packaging_do_not_undo_the_lock() -> None:
    """They are exact, and none is another version of what tests run on, or another torch."""
    tools = pins("package.in")
    assert {"twine", "check-wheel-contents", "validate-pyproject", "cyclonedx-bom"} <= tools.keys()
    assert not tools.keys() & (pins("test.txt") | pins("torch.txt")).keys()
