"""Count what a reader must follow: functions, files, rooms and types on the way of a step, a save and a restore.

``python -m benchmarks.paths [--json]``. One process trains a small model on a local disk, and a profiler records each function of
``relight`` that begins:

- ``step``: a ``step()`` that saves nothing;
- ``saving step``: a ``step()`` that begins a background save, in the trainer's thread only;
- ``save to COMMIT``: a save in the foreground, in all threads;
- ``restore``: a ``restore()`` of the same state, in all threads.

Each is recorded at its second time, so that imports and first-time set-up do not count. The restore is made by a new ``Checkpointer``.
A function is one code object, comprehensions and lambdas excluded. Types are the classes of ``relight`` among the arguments
of these functions. The main class is measured by its source: attributes set on ``self``, and modules of ``relight`` imported by its file.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import relight

PACKAGE = str(Path(relight.__file__).parent) + "/"


class Way(NamedTuple):
    """Counts of what one path called."""

    functions: int
    files: int
    rooms: int
    types: int
    names: list[str]


class Recorder:
    """The functions of ``relight`` that begin while it records, and the types of their arguments."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self._types: set[str] = set()

    @contextmanager
    def recording(self, all_threads: bool) -> Iterator[None]:
        """Record in this thread, or in this one and all that start meanwhile."""
        if all_threads:
            threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type] # None ends it

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        if code not in self._codes:
            self._codes.add(code)
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            kind = type(frame.f_locals.get(name))
            if kind.__module__.startswith("relight"):
                self._types.add(kind.__qualname__)

    def result(self) -> Way:
        """Return the counts."""
        files = {code.co_filename.removeprefix(PACKAGE) for code in self._codes}
        rooms = {file.partition("/")[0] for file in files}
        return Way(len(self._codes), len(files), len(rooms), len(self._types), sorted(self._types))


def measured() -> dict[str, Way]:
    """Return the counts of each way."""
    ways: dict[str, Way] = {}
    with tempfile.TemporaryDirectory() as place:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters())

        def train() -> None:
            optimizer.zero_grad()
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()

        def record(name: str, all_threads: bool, work: Callable[[], Any]) -> None:
            recorder = Recorder()
            with recorder.recording(all_threads):
                work()
            ways[name] = recorder.result()

        with relight.Checkpointer(
            f"{place}/s/background", model=model, optimizer=optimizer, save=relight.every(steps=4)
        ) as ckpt:
            for step in range(ckpt.restore(), 16):
                train()
                recorder = Recorder()
                with recorder.recording(all_threads=False):
                    save = ckpt.step(step)
                ways["step" if save is None else "saving step"] = recorder.result()
                if save is not None or step == 2:  # by step 2, the agent has started
                    time.sleep(1.0)
        run = f"{place}/s/foreground"
        with relight.Checkpointer(run, model=model, optimizer=optimizer, save=None, background=False) as ckpt:
            ckpt.restore()
            for step in range(2):
                train()
                if step:
                    record("save to COMMIT", True, lambda: ckpt.save(1))
                else:
                    ckpt.save(step)
        for turn in range(2):
            ckpt = relight.Checkpointer(run, model=model, optimizer=optimizer, save=None, background=False)
            if turn:
                record("restore", True, ckpt.restore)
            else:
                ckpt.restore()
            ckpt.close(save=False)
    return ways


def main_class() -> dict[str, int]:
    """Return the size of ``Checkpointer``: attributes, modules of ``relight`` that its file imports, lines of file and room."""
    file = Path(sys.modules[relight.Checkpointer.__module__].__file__ or "")
    tree = ast.parse(file.read_text())
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Checkpointer")
    attributes = {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    imports = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("relight")
    }
    rooms = [room for name in ("checkpointer", "ranks", "restore") if (room := Path(PACKAGE) / name).is_dir()]
    sources = [path for room in rooms for path in room.rglob("*.py")]
    return {
        "attributes": len(attributes),
        "imports": len(imports),
        "lines": len(file.read_text().splitlines()),
        "files of the rooms": len(sources),
        "lines of the rooms": sum(len(path.read_text().splitlines()) for path in sources),
    }


def main() -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--types", action="store_true", help="print the names of the types, too")
    options = parser.parse_args()
    ways, size = measured(), main_class()
    if options.json:
        print(json.dumps({"ways": {name: way._asdict() for name, way in ways.items()}, "main class": size}, indent=1))
        return 0
    print(f"{'way':16} {'functions':>9} {'files':>6} {'rooms':>6} {'types':>6}")
    for name, way in ways.items():
        print(f"{name:16} {way.functions:9} {way.files:6} {way.rooms:6} {way.types:6}")
        if options.types:
            print("  " + ", ".join(way.names))
    print("main class: " + ", ".join(f"{count} {name}" for name, count in size.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
