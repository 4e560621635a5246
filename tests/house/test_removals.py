"""Every place that removes or truncates files, and why what it removes is Relight's own."""

from __future__ import annotations

import ast
from pathlib import Path

import relight

SOURCE = Path(relight.__file__).parent
CALLS = {"unlink", "rmtree", "rmdir", "removedirs", "ftruncate", "truncate", "_unlink"}
OWN = {
    "observe/own_files.py": "regular files of this user that match one exact form, through the directory's descriptor",
    "observe/file.py": "the file before the last of this process, by the name that it gave it",
    "comm/local_sockets.py": "sockets of this boot, with names of one exact form, at which no process listens; and the half-made secret of this call, through the directory's descriptor",
    "store/disk.py": "the store's own calls, made by the modules below it",
    "testing/disks.py": "what the store removes: a disk with a quota passes the call on",
    "store/durable.py": "a temporary file next to its target, by the random name that this call made; what is longer than a writer has written",
    "store/blocks.py": "blocks of the cache: names of digits in directories of hexadecimal names that the cache made",
    "supervise/shared_pages.py": "the supervisor's private directory in memory, made by this process, and those of killed supervisors of this user: exact form, owner, mode and marker checked by descriptor",
    "supervise/launch.py": "the directory with copies of stderr, by the random name that torch made in this process; not one that the user named",
    "supervise/incidents.py": "accounts and incidents by the whole names under which this process wrote them",
    "export/atomic_output.py": "the directory next to the target, by the random name that this export made, or a dead one that held its lock; weights of an earlier export",
    "export/newest.py": "names of one exact form, below the locked directory of versions that this export or an earlier one made",
    "commit/plugin_codecs.py": "the agent's own file, by its whole path, next to its socket",
    "drill/drive.py": "the drill's own temporary directory",
    "drill/orders.py": "a drill's orders, by their whole path",
    "arena/memory.py": "anonymous memory",
    "peers/holder.py": "anonymous memory",
    "checkpointer/workers.py": "anonymous memory",
    "checkpointer/handover.py": "this rank's own claim, by its whole path",
    "heartbeat/rank_state.py": "a page in the supervisor's private directory, by its whole path",
    "heartbeat/heartbeat_page.py": "a page in the supervisor's private directory, by its whole path",
    "heartbeat/ease.py": "a page in the supervisor's private directory, by its whole path",
    "heartbeat/save_request.py": "a page in the supervisor's private directory, by its whole path",
    "integrations/engines.py": "the two directories of weights, by their fixed names, in the folder that the caller gives for them alone",
    "prove/drive.py": "the proof's own temporary directory",
    "demo/drive.py": "the demonstration's own temporary directory",
}
"""By file: what it removes. Removals by a pattern go through ``OwnFiles``."""


def test_every_removal_is_listed_with_what_it_removes() -> None:
    """A new call that removes or truncates files needs its line, and a pattern of names needs ``OwnFiles``."""
    removals: dict[str, list[int]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if name.startswith("bench/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in CALLS or (
                    called == "remove"
                    and isinstance(node.func, ast.Attribute)
                    and getattr(node.func.value, "id", "") == "os"
                ):
                    removals.setdefault(name, []).append(node.lineno)
    assert removals.keys() == OWN.keys(), {
        name: lines for name, lines in removals.items() if name not in OWN
    } or OWN.keys() - removals.keys()


def test_no_removal_follows_a_glob() -> None:
    """``for path in folder.glob(…): path.unlink()`` removes whatever matches; only the supervisor's private directory is listed that way."""
    result = set()
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.For) and any(
                isinstance(child, ast.Attribute) and child.attr in ("glob", "rglob", "iterdir")
                for child in ast.walk(node.iter)
            ):
                calls = {
                    child.func.attr
                    for child in ast.walk(node)
                    if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute)
                }
                if calls & CALLS:
                    result.add(name)
    assert {path for path in result if not path.startswith("bench/")} == {"supervise/shared_pages.py"}, (
        "a glob in a generator is found by its name: see shared_pages"
    )
