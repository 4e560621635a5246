"""Files around the source: pins, targets, types, and words that no file may contain."""

from __future__ import annotations

import os
import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import changelog
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tree import PRODUCT, ROOT, files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NEEDS_A_GPU = {"nvidia-nvcomp-cu13"}
"""Of no use on the machines that CI has: `make gpu` takes what is there."""
GOLDEN = ROOT / "tests" / "golden" / "v1"


def pins(name: str) -> dict[str, str]:
    """Return the pinned versions of a requirements file, by canonical name."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    lines = [line.strip().rstrip("\\").strip() for line in text.splitlines()]
    pinned = [line for line in lines if line and not line.startswith(("#", "--hash="))]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", line) for line in pinned), "every line is an exact pin"
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in pinned}


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "requirements").glob("*.in")))
def test_a_lock_has_what_is_asked_for_with_hashes_and_without_torch(name: str) -> None:
    """``NAME.txt`` is made from ``NAME.in``; each pin has its hashes; nothing in it is torch."""
    locked = pins(f"{name}.txt")
    assert locked == pins(f"{name}.in")
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    assert all("--hash=sha256:" in block for block in re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:])
    assert not {"torch", "torchvision", "torchaudio"} & locked.keys()


def test_what_is_installed_has_hashes() -> None:
    """The Makefile installs requirements by hash, except torch (the machine chooses its build) and the tools that make the locks."""
    installs = [
        line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if "--requirement " in line
    ]
    assert len(installs) == 3 and all("--require-hashes" in line and ".txt" in line for line in installs)


def test_the_lock_is_complete() -> None:
    """Whatever a pinned package needs here is pinned too, in a version it accepts: it is installed without resolving."""
    locked = pins("test.txt") | pins("torch.txt")
    missing = []
    for name in locked:
        try:
            needs = requires(name) or []
        except PackageNotFoundError:
            missing.append(f"{name} is not installed")
            continue
        for need in map(Requirement, needs):
            key = canonicalize_name(need.name)
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            if name == "torch" and key.startswith(("nvidia", "cuda", "triton")):
                continue
            if key not in locked or not need.specifier.contains(locked[key], prereleases=True):
                missing.append(f"{name} needs {need}")
    assert missing == []


def test_the_pins_are_releases_that_the_package_accepts() -> None:
    """What is tested is something that a user may install: base, and every extra but what needs a GPU."""
    locked = (
        pins("test.txt")
        | pins("torch.txt")
        | pins("trackers.txt")
        | pins("rdma.txt")
        | pins("exports.txt")
        | pins("test.txt")
    )
    wanted = [*PROJECT["project"]["dependencies"], *sum(PROJECT["project"]["optional-dependencies"].values(), [])]
    for need in map(Requirement, wanted):
        if need.name != "relight" and need.name not in NEEDS_A_GPU:
            assert need.specifier.contains(locked[canonicalize_name(need.name)]), str(need)


def test_ci_runs_what_people_run() -> None:
    """``.ci/run`` stops at the first failure and calls ``make test``."""
    script = ROOT / ".ci" / "run"
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[0].endswith("bash")
    assert "set -eu" in lines
    assert "make test" in lines
    assert os.access(script, os.X_OK)


def test_every_target_is_described() -> None:
    """``make help`` has a line for each target, and each is phony: a file of that name would stop it."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):(.*)$", text, re.MULTILINE)
    assert [name for name, rest in targets if "## " not in rest] == []
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony and set(phony[1].split()) == {name for name, _ in targets}
    assert {"check", "test", "crash", "bench", "docs", "demo", "kills", "grid", "gpu", "wheel", "clean", "help"} <= {
        name for name, _ in targets
    }


def test_the_package_is_marked_as_typed_and_has_a_licence() -> None:
    """``py.typed`` exists, for users' type checkers, and the licence is Apache 2.0."""
    assert (PRODUCT / "py.typed").is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_the_page_of_the_design_lists_rooms_in_the_linters_order() -> None:
    """Who may import whom reads the same in ``docs/design.md`` and in ``pyproject.toml``: each room once, never above one that may import it."""
    layers = [row.split(" | ") for row in PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]]
    level = {room: number for number, row in enumerate(layers) for room in row}
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`[^|]*) \|", page.partition("\n## Rooms\n")[2], re.MULTILINE)
    listed = [re.findall(r"`(\w+)`", row) for row in rows]
    assert sorted(room for row in listed for room in row) == sorted(level)
    numbers = [level[room] for row in listed for room in row]
    assert numbers == sorted(numbers) and all(len({level[room] for room in row}) == 1 for row in listed)


def test_every_ignored_rule_has_its_reason() -> None:
    """A rule of the linter is switched off in ``pyproject.toml`` with a word why."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ignored = re.search(r"^ignore = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    per_file = re.search(r"per-file-ignores\]\n(.*?)\n\n", text, re.DOTALL)
    assert ignored and per_file
    lines = [*ignored[1].splitlines(), *per_file[1].splitlines()]
    assert [line for line in lines if "# " not in line] == []


def test_each_fragment_of_the_changelog_has_a_kind_and_bullets() -> None:
    """A fragment's name ends with a known kind. Each of its lines is a bullet with a text, or continues one."""
    wrong = []
    for fragment in changelog.fragments():  # none, right after a release
        try:
            changelog.kind_of(fragment)
        except ValueError as error:
            wrong.append(str(error))
        lines = fragment.read_text(encoding="utf-8").splitlines()
        if not lines or not lines[0].startswith("- ") or not all(re.match(r"(- |  +)\S", line) for line in lines):
            wrong.append(f"{fragment.name}: not a list of bullets")
    assert wrong == []


def test_the_changelog_has_a_section_for_each_kind(tmp_path: Path) -> None:
    """Fragments are sorted by kind, then by name. Their links are right for a file next to the folder."""
    for name, text in {
        "b.fixed.md": "- B is fixed.\n",
        "a.fixed.md": "- A is fixed ([why](../docs/a.md)).\n  More.\n",
        "z.added.md": "- Z is new.\n",
        "README.md": "# How\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    fixed = "- A is fixed ([why](docs/a.md)).\n  More.\n- B is fixed.\n"
    assert changelog.collect(tmp_path) == f"### Added\n\n- Z is new.\n\n### Fixed\n\n{fixed}"
    for name in ("c.md", "c.broken.md", ".fixed.md", "c.d.fixed.md", "c.fixed.txt"):
        (tmp_path / name).write_text("- C.\n", encoding="utf-8")
        with pytest.raises(ValueError, match=re.escape(f"{name} is not WHAT.KIND.md")):
            changelog.collect(tmp_path)
        (tmp_path / name).unlink()


def test_no_file_names_a_machine_or_a_registry() -> None:
    """The project speaks of itself alone: no home directories, no places of one machine, no hosts of package registries."""
    words = [
        *("/" + word + "/" for word in ("work", "root", "opt", "Users")),
        r"/home/[a-z]",
        r"/tmp/[a-z]\w*/(?:bin|lib)",
        "py" + r"pi\.org", "python" + "hosted", r"download\." + "pytorch", "registry" + r"\.npmjs", r"deb\." + "debian", "index" + "-url",
    ]  # fmt: skip
    pattern = re.compile("|".join(rf"(?<![\w.]){word}" for word in words))
    names = []
    for path in files():
        if path.is_relative_to(GOLDEN) or path.suffix in (".png", ".safetensors", ".msgpack"):
            continue
        for match in pattern.finditer(path.read_text(encoding="utf-8", errors="replace")):
            names.append(f"{path.relative_to(ROOT)}: {match[0]}")
    assert names == []
