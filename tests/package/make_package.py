"""Run by ``make package``: wheel and sdist, built twice and compared, checked, installed for each Python that is there, and tried as installed."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
LOCKS = {"hub": "exports.txt", "trackers": "trackers.txt"}
"""Extras that are tested in an environment of their target, with a lock of its own."""
OF_GPUS = {"nvcomp", "rdma"}
"""Extras that bring a vendor's libraries: CI has no device for them, and does not install them."""
PYRIGHT = {
    "typeCheckingMode": "standard",
    "reportUnnecessaryTypeIgnoreComment": "error",
    "enableTypeIgnoreComments": True,
}
"""pyright's defaults; an ignore without an error is an error."""
TORCHES = {"torch", "torchvision", "torchaudio"}


class Wrong(Exception):
    """The built package is wrong."""


def run(command: list[str | Path], cwd: Path = ROOT, **more: str) -> str:
    """Run a command and return its standard output. Raise ``Wrong`` with its output if it fails."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Wrong(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def report(what: str) -> None:
    """Print a step that is done."""
    print(f"  {what}", flush=True)


def moment() -> str:
    """Return the time that everything built has: ``SOURCE_DATE_EPOCH`` if it is set, else the last commit's."""
    return os.environ.get("SOURCE_DATE_EPOCH") or run(["git", "log", "-1", "--format=%ct"]).strip()


def tracked() -> list[str]:
    """Return the files that git knows."""
    return [name for name in run(["git", "ls-files", "-z"]).split("\0") if name and (ROOT / name).is_file()]


def build(source: Path, out: Path, *targets: str, **more: str) -> list[Path]:
    """Build ``source`` with hatchling. Return the files, sorted."""
    out.mkdir(parents=True, exist_ok=True)
    run(
        [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "-d",
            out,
            *(part for target in targets for part in ("-t", target)),
        ],
        cwd=source,
        **more,
    )
    return sorted(out.iterdir())


def digest(path: Path) -> str:
    """Return a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def same(one: list[Path], other: list[Path]) -> None:
    """Raise ``Wrong`` unless both lists have the same files with the same bytes."""
    if [path.name for path in one] != [path.name for path in other]:
        raise Wrong(f"built {[path.name for path in one]}, and then {[path.name for path in other]}")
    for left, right in zip(one, other, strict=True):
        if digest(left) != digest(right):
            odd = sorted({name for name, _ in set(members(left)) ^ set(members(right))})
            raise Wrong(
                f"{left.name} differs when it is built elsewhere, in {', '.join(odd[:8]) or 'order or attributes'}: a file git does not know?"
            )


def members(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the SHA-256 of each file in a wheel or sdist."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                yield name, hashlib.sha256(wheel.read(name)).hexdigest()
        return
    with tarfile.open(path) as sdist:
        for member in sdist:
            content = sdist.extractfile(member)
            if content is not None:
                yield member.name, hashlib.sha256(content.read()).hexdigest()


def build_twice(out: Path, work: Path) -> tuple[Path, Path]:
    """Build wheel and sdist twice, elsewhere the second time, and the wheel from the sdist. Return both; they must be
    equal."""
    epoch = moment()
    shutil.rmtree(out, ignore_errors=True)
    first = build(ROOT, out, SOURCE_DATE_EPOCH=epoch)
    copy = work / "another place"
    for name in tracked():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
        target.chmod((ROOT / name).stat().st_mode & 0o700)
        os.utime(target, (1_000_000_000, 1_000_000_000))
    same(
        first, build(copy, work / "again", SOURCE_DATE_EPOCH=epoch, TZ="Asia/Kathmandu", LC_ALL="C", PYTHONHASHSEED="7")
    )
    report(f"built twice, elsewhere under another umask, time zone, locale: the same bytes (SOURCE_DATE_EPOCH={epoch})")
    sdist, wheel = (next(path for path in first if path.suffix == suffix) for suffix in (".gz", ".whl"))
    with tarfile.open(sdist) as archive:
        # Python 3.11.4 has it; this archive is ours
        safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(work / "unpacked", **safe)
    (inside,) = (work / "unpacked").iterdir()
    same([wheel], build(inside, work / "from-sdist", "wheel", SOURCE_DATE_EPOCH=epoch))
    report("the wheel built from the sdist: the same bytes")
    for path in first:
        report(f"{digest(path)}  {path.name}  {path.stat().st_size / 1e6:.2f} MB")
    return wheel, sdist


def contents(wheel: Path, sdist: Path, known: list[str]) -> None:
    """Check that the wheel has the product's files and licence, and nothing else, and the sdist what its tests need."""
    hashes = dict(members(wheel))
    product = {name.removeprefix("src/") for name in known if name.startswith("src/relight/")}
    meta = {name for name in hashes if ".dist-info/" in name}
    if set(hashes) - meta != product:
        raise Wrong(f"wheel and tree differ in {sorted((set(hashes) - meta) ^ product)[:8]}")
    for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"):
        if not any(file.endswith(f".dist-info/{name}") for file in meta):
            raise Wrong(f"{name} is not in the wheel")
    inside = {name.partition("/")[2] for name, _ in members(sdist)}
    missing = sorted(name for name in known if name not in inside and not name.startswith(".git"))
    if missing:
        raise Wrong(f"not in the sdist: {', '.join(missing[:8])}")
    report(f"the wheel has all {len(product)} files of the product and no other, the sdist its {len(inside)}")


def metadata(wheel: Path, sdist: Path, bin_: Path) -> None:
    """Check that the metadata for indexes and installers is well-formed, and that the page renders."""
    run([bin_ / "validate-pyproject", ROOT / "pyproject.toml"])
    run([bin_ / "twine", "check", "--strict", wheel, sdist])
    run([bin_ / "check-wheel-contents", wheel])
    report("validate-pyproject, twine check --strict and check-wheel-contents find nothing")


def bill_of_materials(bin_: Path, to: Path) -> None:
    """Write the bill of materials of tests and demo as CycloneDX: each locked package with its files' hashes."""
    to.parent.mkdir(parents=True, exist_ok=True)
    options = ["--output-reproducible", "--of", "JSON", "--sv", "1.6", "--pyproject", ROOT / "pyproject.toml", "-o", to]
    run([bin_ / "cyclonedx-py", "requirements", *options, ROOT / "requirements" / "test.txt"])
    listed = bill(json.loads(to.read_text(encoding="utf-8")))
    locked = pins("test.txt")
    if listed.keys() != locked.keys() or any(version != locked[name] for name, (version, _) in listed.items()):
        raise Wrong(f"bill and lock differ in {sorted(set(listed) ^ set(locked))[:8]}")
    bare = [name for name, (_, hashes) in listed.items() if not hashes]
    if bare:
        raise Wrong(f"without hashes in the bill: {', '.join(bare[:8])}")
    report(
        f"bill of materials: {len(listed)} packages, {sum(hashes for _, hashes in listed.values())} hashes, in {to.relative_to(ROOT)}"
    )


def bill(read: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """Return each component's version and number of hashes."""
    components = {}
    for component in read["components"]:
        references = component.get("externalReferences", [])
        components[canonical(component["name"])] = (
            component["version"],
            sum(len(reference.get("hashes", [])) for reference in references),
        )
    return components


def canonical(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(name: str) -> dict[str, str]:
    """Return the versions that a requirements file pins, by name."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    return {
        canonical(package): version for package, version in re.findall(r"^([\w.-]+)==([\w.+]+)", text, re.MULTILINE)
    }


def constraints(work: Path) -> Path:
    """The versions of both locks, without hashes, as installers take them for names they were not asked for."""
    path = work / "constraints.txt"
    path.write_text(
        "".join(f"{name}=={version}\n" for name, version in sorted((pins("test.txt") | pins("torch.txt")).items()))
    )
    return path


def interpreters(asked: list[str]) -> dict[str, Path]:
    """Return the supported Pythons that are installed, by the version that each of them reports."""
    paths: dict[str, Path] = {}
    for name in asked or [f"python{version}" for version in PYTHONS]:
        path = shutil.which(name)
        if path is None:
            if asked:
                raise Wrong(f"there is no {name}")
            continue
        done = subprocess.run(
            [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0 and done.stdout.strip() in PYTHONS:
            paths.setdefault(done.stdout.strip(), Path(path))
    return paths


def as_installed(version: str, python: Path, wheel: Path, work: Path, tools: Path) -> None:
    """A venv that has torch, the wheel, and what that asks for: tried there, away from the tree. Then each extra, resolved."""
    venv = work / f"python{version}"
    run([python, "-m", "venv", "--clear", venv])
    own, kept = venv / "bin" / "python", constraints(work)
    pip: list[str | Path] = [own, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, "install", "--constraint", kept, f"torch=={pins('torch.txt')['torch']}"])
    run([*pip, "install", "--constraint", kept, wheel])
    away = work / f"away{version}"
    away.mkdir()
    for line in run([own, "-I", HERE / "try_installed.py", venv], cwd=away).splitlines():
        report(f"Python {version}: {line}")
    types = [
        sys.executable,
        "-m",
        "mypy",
        "--python-executable",
        own,
        "--cache-dir",
        work / "mypy",
        "--config-file",
        os.devnull,
    ]
    run([*types, "--strict", "--warn-unused-ignores", HERE / "typed_user.py"], cwd=away)
    report(f"Python {version}: mypy --strict sees the types, and the mistakes, in a user's file")
    (away / "pyrightconfig.json").write_text(json.dumps(PYRIGHT | {"include": [str(HERE / "typed_user.py")]}))
    run([tools / "basedpyright", "--pythonpath", own, "--project", away / "pyrightconfig.json"], cwd=away)
    report(f"Python {version}: pyright's defaults see them, too")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in extras:
        plan = run(
            [
                *pip,
                "install",
                "--dry-run",
                "--report",
                "-",
                "--constraint",
                kept,
                f"relight[{extra}] @ {wheel.as_uri()}",
            ]
        )
        brought = {canonical(package["metadata"]["name"]) for package in json.loads(plan)["install"]}
        if brought & TORCHES:
            raise Wrong(f"the extra {extra} would replace torch")
        locks = ["test.txt", "torch.txt", *([LOCKS[extra]] if extra in LOCKS else [])]
        unlocked = brought - {"relight"}.union(*map(pins, locks))
        if unlocked and version == PYTHONS[0] and extra not in OF_GPUS:
            raise Wrong(f"the extra {extra} brings what its locks do not have: {', '.join(sorted(unlocked))}")
    report(f"Python {version}: all {len(extras)} extras resolve against their locks, and none touches torch")


def main() -> int:
    """Make and check the package. Return 1 after printing what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tools", type=Path, default=Path(sys.executable).parent, help="where twine and the like are installed"
    )
    parser.add_argument(
        "--python", action="append", default=[], help="an interpreter to try it on; by default python3.11 to python3.14"
    )
    parser.add_argument("--only-build", action="store_true", help="nothing is installed")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    given.out = given.out.resolve()
    with tempfile.TemporaryDirectory(prefix="relight-package-") as folder:
        work = Path(folder)
        try:
            wheel, sdist = build_twice(given.out, work)
            contents(wheel, sdist, tracked())
            metadata(wheel, sdist, given.tools)
            bill_of_materials(given.tools, ROOT / "build" / "relight.cdx.json")
            pythons = {} if given.only_build else interpreters(given.python)
            for version, python in pythons.items():
                as_installed(version, python, wheel, work, given.tools)
        except Wrong as wrong:
            print(f"wrong: {wrong}", file=sys.stderr)
            return 1
    absent = [version for version in PYTHONS if version not in pythons]
    if absent:
        print(
            f"not tried as installed, as there was no interpreter or it was not asked for: Python {', '.join(absent)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
