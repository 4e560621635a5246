"""Types that are new to msgspec, used by several threads at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import relight
from relight.decode import from_json_bytes, from_msgpack
from relight.run_records.incident_sync import DIRECTORY
from relight.store import open_bytes
from relight.supervise.incidents import read_accounts, read_incidents

AT_ONCE = """
import sys, threading, types
import msgspec
from relight.decode import from_json_bytes, from_msgpack, from_plain
sys.setswitchinterval(1e-6)
lines = ["from __future__ import annotations", "import msgspec"]
lines += [f"class In{n}(msgspec.Struct):\\n    x: int = 0\\n    y: dict[str, int] | None = None" for n in range(8)]
lines += ["class Out(msgspec.Struct):", *(f"    a{n}: In{n} | None = None" for n in range(8))]
code = compile("\\n".join(lines), "types", "exec")
plain = {f"a{n}": {"x": 1} for n in range(8)}
json, packed = msgspec.json.encode(plain), msgspec.msgpack.encode(plain)
ways = [lambda kind: from_plain(plain, kind), lambda kind: from_json_bytes(json, kind), lambda kind: from_msgpack(packed, kind)]
for _ in range(int(sys.argv[1])):
    module = sys.modules["made"] = types.ModuleType("made")
    exec(code, module.__dict__)
    barrier, found = threading.Barrier(4), []
    def ask(way):
        barrier.wait()
        found.append(way(module.Out))
    threads = [threading.Thread(target=ask, args=(ways[n % 3],)) for n in range(4)]
    for one in threads: one.start()
    for one in threads: one.join()
    assert len(found) == 4 and all(one.a7.x == 1 for one in found)
"""


def test_several_threads_may_be_the_first() -> None:
    """msgspec alone crashes with SIGSEGV here, within some dozen types."""
    done = subprocess.run([sys.executable, "-c", AT_ONCE, "300"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("call", [r"type=[A-Za-z_\[]", r"msgspec\.convert\(", r"Decoder\([^)]"])
def test_nothing_else_gives_msgspec_a_type(call: str) -> None:
    """Otherwise two threads may be the first."""
    root = Path(relight.__file__).parent
    lines = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        if path.name != "decode.py"
        for line in path.read_text().splitlines()
        if re.search(rf"msgspec.*{call}" if "msgspec" not in call else call, line)
    ]
    assert lines == []


@pytest.mark.parametrize("data", [b'{"job":"a\xde"}', b'{"job":"\xed\xa0\x80"}'])
def test_invalid_utf8_raises_the_usual_error(data: bytes) -> None:
    """msgspec raises another error for invalid UTF-8. Callers get the error of every other wrong value."""

    class Named(msgspec.Struct):
        job: str = ""

    with pytest.raises(msgspec.MsgspecError):
        from_json_bytes(data, Named)
    with pytest.raises(msgspec.MsgspecError):
        from_msgpack(b"\x81\xa3job\xa1\xde", Named)


def test_an_incident_with_such_text_is_left_out(tmp_path: Path) -> None:
    """Such an incident is ignored, and the error does not reach the caller."""
    store = open_bytes(tmp_path)
    for name in ("0000000000001-aaaaaa.json", "0000000000002-bbbbbb.account.json"):
        store.put_once(f"run/{DIRECTORY}/{name}", b'{"id":"\xde","job":"\xde"}')
    assert read_incidents(store, "run") == [] and read_accounts(store, "run") == []
