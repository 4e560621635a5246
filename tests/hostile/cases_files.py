"""Hostile directories: links, pipes, sockets, devices and directories where files of the store should be."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from case import NEWEST_RECORD, Case, pack_of, part_of, root_of
from forge import DIRS, RUN, record_key

ROOT, PART, PACK = root_of("c"), part_of("c"), pack_of("c")
HEAD = record_key(10)
Change = Callable[[Path], object]


def aside(store: Path, key: str) -> Path:
    """Move a file or directory of the store outside of it. Return its new path."""
    target = store.parent / "outside" / key.replace("/", "_")
    shutil.move(store / key, target)
    return target


def link(key: str) -> Change:
    """A symbolic link to the very same bytes."""
    return lambda store: (store / key).symlink_to(aside(store, key))


def dangling(key: str) -> Change:
    """A symbolic link to nothing."""
    return lambda store: (aside(store, key), (store / key).symlink_to(store / "nowhere"))


def loop(key: str) -> Change:
    """A symbolic link to itself."""
    return lambda store: (aside(store, key), (store / key).symlink_to(store / key))


def fifo(key: str) -> Change:
    """A pipe that would block a process that opens it without O_NONBLOCK."""
    return lambda store: (aside(store, key), os.mkfifo(store / key))


def directory(key: str) -> Change:
    """A directory."""
    return lambda store: (aside(store, key), (store / key).mkdir())


def file(key: str) -> Change:
    """A file in place of a directory."""
    return lambda store: (aside(store, key), (store / key).write_bytes(b"x"))


def listening(key: str) -> Change:
    """A socket."""

    def change(store: Path) -> None:
        if (store / key).exists():
            aside(store, key)
        here = Path.cwd()
        os.chdir((store / key).parent)  # the path of a socket may have 107 characters
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind((store / key).name)
        finally:
            os.chdir(here)

    return change


def device(key: str) -> Change:
    """A symbolic link to a device without end: what an unprivileged attacker can make."""
    return lambda store: (aside(store, key), (store / key).symlink_to("/dev/zero"))


def hard(key: str) -> Change:
    """A second name, outside, of the very same file: nothing a reader could see or should mind."""
    return lambda store: os.link(store / key, store.parent / "outside" / "hard")


def sparse(key: str) -> Change:
    """A file of a terabyte that holds next to nothing."""
    return lambda store: os.truncate(store / key, 1 << 40)


def cut(key: str) -> Change:
    """An empty file."""
    return lambda store: os.truncate(store / key, 0)


def make(key: str, data: bytes = b"") -> Change:
    """Return a change that adds one file."""
    return lambda store: (store / key).write_bytes(data)


def _names(store: Path) -> None:
    for name in ("..x", "-rf", "new\nline", "\x1b[31m", "ünï", "a" * 129, "log", ".hidden", "%2e%2e"):
        (store / name / "log").mkdir(parents=True)
        (store / name / "log" / "000000000000.json").write_bytes(b"x")


def _junk(store: Path) -> None:
    for number in range(5_000):
        (store / RUN / "log" / f"junk-{number}").touch()


def _second_run(change: Change) -> Change:
    """Return a change that adds a hostile run next to the good one."""
    return lambda store: ((store / "evil").mkdir(), change(store / "evil"))


CASES: list[Case] = [
    *(
        Case(f"{what}: {key.rsplit('/', 1)[-1]}", after=change(key), newest="b", named=key)
        for key in (NEWEST_RECORD, ROOT, PART, PACK)
        for what, change in (
            ("symbolic link", link),
            ("dangling link", dangling),
            ("link to itself", loop),
            ("link to a device", device),
            ("pipe", fifo),
            ("socket", listening),
            ("directory", directory),
            ("a terabyte", sparse),
            ("cut to nothing", cut),
        )
    ),
    *(
        Case(f"{what}: relight.json", after=change("relight.json"), named="relight.json")
        for what, change in (
            ("symbolic link", link),
            ("dangling link", dangling),
            ("link to itself", loop),
            ("link to a device", device),
            ("pipe", fifo),
            ("socket", listening),
            ("directory", directory),
            ("a terabyte", sparse),
            ("cut to nothing", cut),
        )
    ),
    *(
        Case(f"{what}: the next record", after=change(HEAD), named=HEAD)
        for what, change in (
            ("pipe", lambda key: lambda store: os.mkfifo(store / key)),
            ("socket", listening),
            ("directory", lambda key: lambda store: (store / key).mkdir()),
            ("dangling link", lambda key: lambda store: (store / key).symlink_to("nowhere")),
            ("empty file", make),
        )
    ),
    *(
        Case(f"{what}: the log", after=change(f"{RUN}/log"), newest=None, resumes=False)
        for what, change in (
            ("symbolic link", link),
            ("dangling link", dangling),
            ("pipe", fifo),
            ("socket", listening),
            ("file", file),
        )
    ),
    *(
        Case(f"{what}: the run", after=change(RUN), newest=None, resumes=False)
        for what, change in (("symbolic link", link), ("dangling link", dangling), ("pipe", fifo), ("file", file))
    ),
    *(
        Case(f"{what}: the checkpoint", after=change(DIRS["c"]), newest="b", named=DIRS["c"])
        for what, change in (("symbolic link", link), ("dangling link", dangling), ("pipe", fifo), ("file", file))
    ),
    Case("missing: the checkpoint", after=lambda store: aside(store, DIRS["c"]), newest="b", named=DIRS["c"]),
    Case("hard link: pack", after=hard(PACK)),
    Case("hard link: record", after=hard(NEWEST_RECORD)),
    Case("unknown file in a checkpoint", after=make(f"{DIRS['c']}/evil.pkl", b"\x80\x04")),
    Case("unknown files in the log", after=_junk),
    Case("leftover of a record", after=make(f"{RUN}/log/.tmp-000000000010.json-00", b"x")),
    Case("invalid run names", after=_names),
    Case("a run with a link as log", after=_second_run(lambda run: (run / "log").symlink_to("/etc"))),
    Case("a run with a file as log", after=_second_run(lambda run: (run / "log").write_bytes(b"x"))),
    Case("a run with a pipe as log", after=_second_run(lambda run: os.mkfifo(run / "log"))),
    Case("a run that is a link", after=lambda store: (store / "evil").symlink_to("/etc")),
]
