"""Hostile logs: sealed records with invalid contents, bytes that are not records, broken chains."""

from __future__ import annotations

from typing import Any

from blake3 import blake3
from case import BOMBS, NEWEST_RECORD, Case
from forge import DIRS, RUN, SEQ, Forge, dumps, record_key

from relight.format.strict import seal

ANSI = "\x1b[31mred\x1b[0m\r\nfake line"
MISSING = object()
HEX = "0123456789abcdef" * 4
D, FAR = "d" * 10, 10**16 - 1
NO_NUMBERS = ("10", "00000000010", "٠٠٠٠٠٠٠٠٠٠١٠", "-00000000010", "0000000000010")


def _set(at: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        del at[name]
    else:
        at[name] = value


def frame(name: str, value: Any) -> Any:
    """The newest COMMIT with one field of its frame changed."""
    return lambda forge: forge.record(SEQ["c"], lambda record: _set(record, name, value))


def body(name: str, value: Any) -> Any:
    """The newest COMMIT with one field of its body changed."""
    return lambda forge: forge.record(SEQ["c"], lambda record: _set(record["body"], name, value))


FRAMES: list[tuple[str, str, Any]] = [
    ("version 0", "version", 0),
    ("version 2", "version", 2),
    ("version 2^31", "version", 2**31),
    ("version −1", "version", -1),
    ("version is text", "version", "1"),
    ("version is true", "version", True),
    ("version 1.0", "version", 1.0),
    ("version is null", "version", None),
    ("no version", "version", MISSING),
    ("another kind of file", "relight", "store"),
    ("kind in lower case", "kind", "commit"),
    ("kind unknown", "kind", "EXECUTE"),
    ("kind with escapes", "kind", ANSI),
    ("kind is a number", "kind", 5),
    ("kind is RUN", "kind", "RUN"),
    ("seq is another's", "seq", 8),
    ("seq of the next", "seq", 10),
    ("seq −1", "seq", -1),
    ("seq 2^63", "seq", 2**63),
    ("seq is text", "seq", "9"),
    ("seq 9.0", "seq", 9.0),
    ("prev in upper case", "prev", HEX.upper()),
    ("prev too short", "prev", HEX[:63]),
    ("prev too long", "prev", HEX + "0"),
    ("prev not hexadecimal", "prev", "x" * 64),
    ("prev with a newline", "prev", HEX + "\n"),
    ("prev names an algorithm", "prev", "md5:" + HEX[:60]),
    ("store of another", "store", "0" * 32),
    ("store in upper case", "store", "A" * 32),
    ("store empty", "store", ""),
    ("run of another", "run", "1" * 32),
    ("run is a path", "run", "../../" + "a" * 26),
    ("run with a newline", "run", "1" * 32 + "\n"),
    ("epoch −1", "epoch", -1),
    ("epoch before the fence", "epoch", 1),
    ("epoch 0", "epoch", 0),
    ("epoch not its directory's", "epoch", 3),
    ("epoch above what its number allows", "epoch", 101),
    ("epoch 10^12", "epoch", 10**12),
    ("epoch 2^63", "epoch", 2**63),
    ("epoch is text", "epoch", "2"),
    ("epoch is true", "epoch", True),
    ("time is a number", "time", 5),
    ("writer is null", "writer", None),
    ("an unknown field", "extra", 1),
    ("an unknown field with escapes", ANSI, 1),
    ("an unknown field of half a megabyte", "x" * 500_000, 1),
    ("an unknown field of 4,000 characters", "x" * 4000, 1),
    ("__class__ as a field", "__class__", "os.system"),
    ("__proto__ as a field", "__proto__", {"admin": True}),
    ("body is a list", "body", []),
    ("body is null", "body", None),
    ("no body", "body", MISSING),
]

BODIES: list[tuple[str, str, Any]] = [
    ("id leaves the store", "id", "../../x"),
    ("id in upper case", "id", "C" * 10),
    ("id too short", "id", "c" * 9),
    ("id with escapes", "id", ANSI),
    ("id is a number", "id", 5),
    ("step −1", "step", -1),
    ("step 2^63", "step", 2**63),
    ("step 2^64", "step", 2**64),
    ("step 2^64 − 1", "step", 2**64 - 1),
    ("step 1.5", "step", 1.5),
    ("step 30.0", "step", 30.0),
    ("step is text", "step", "30"),
    ("step is true", "step", True),
    ("step is null", "step", None),
    ("dir leaves the store", "dir", "../../x"),
    ("dir is absolute", "dir", "/etc"),
    ("dir with backslashes", "dir", "..\\..\\x"),
    ("dir goes up and down", "dir", "log/../0000000030-cccccccccc-e2"),
    ("dir starts with a dot", "dir", "./0000000030-cccccccccc-e2"),
    ("dir ends with a slash", "dir", "0000000030-cccccccccc-e2/"),
    ("dir ends with a space", "dir", "0000000030-cccccccccc-e2 "),
    ("dir ends with a dot", "dir", "0000000030-cccccccccc-e2."),
    ("dir ends with a newline", "dir", "0000000030-cccccccccc-e2\n"),
    ("dir with a zero byte", "dir", "0000000030-cccccccccc-e2\0"),
    ("dir with percent signs", "dir", "%2e%2e%2f%2e%2e%2fx"),
    ("dir with two percent signs", "dir", "%252e%252e%252fx"),
    ("dir with full-width digits", "dir", "００００００００30-cccccccccc-e2"),
    ("dir with a padded epoch", "dir", "0000000030-cccccccccc-e02"),
    ("dir with a padded step", "dir", "00000000030-cccccccccc-e2"),
    ("dir of another checkpoint", "dir", DIRS["b"].split("/")[1]),
    ("dir with escapes", "dir", ANSI),
    ("dir of half a megabyte", "dir", "x" * 500_000),
    ("dir is CON", "dir", "CON"),
    ("dir is the log", "dir", "log"),
    ("dir empty", "dir", ""),
    ("root in upper case", "root", HEX.upper()),
    ("root too short", "root", HEX[:32]),
    ("root not hexadecimal", "root", "g" * 64),
    ("root of none", "root", "none"),
    ("root of something else", "root", HEX),
    ("root_bytes −1", "root_bytes", -1),
    ("root_bytes 0", "root_bytes", 0),
    ("root_bytes too small", "root_bytes", 20),
    ("root_bytes 2^63", "root_bytes", 2**63),
    ("logical_bytes −1", "logical_bytes", -1),
    ("stored_bytes 2^64 − 1", "stored_bytes", 2**64 - 1),
    ("new_bytes is text", "new_bytes", "5"),
    ("metric is text", "metrics", {"loss": "12"}),
    ("metric is NaN in capitals", "metrics", {"loss": "NaN"}),
    ("metric is the number NaN", "metrics", {"loss": float("nan")}),
    ("metric is infinite", "metrics", {"loss": float("inf")}),
    ("metric is a list", "metrics", {"loss": [1]}),
    ("metric is null", "metrics", {"loss": None}),
    ("metric is code", "metrics", {"loss": "__import__('os').system('x')"}),
    ("metric with escapes", "metrics", {ANSI: "x"}),
    ("metrics is a list", "metrics", []),
    ("metric with a lone surrogate", "metrics", {"\ud800": 1}),
    ("parents leave the store", "parents", ["../../x"]),
    ("parents with escapes", "parents", [ANSI]),
    ("parents are numbers", "parents", [1]),
    ("parents is text", "parents", "aaaaaaaaaa"),
    ("requires leave the store", "requires", ["/etc/passwd"]),
    ("suspect is text", "suspect", "yes"),
    ("reason is a lone surrogate", "reason", "\ud800"),
    ("no root", "root", MISSING),
    ("an unknown field in the body", "extra", ANSI),
    ("an unknown field in the body with escapes", ANSI, 1),
]

VOID = {"epoch before the fence", "epoch 0", "epoch not its directory's"}
"""These records are well formed, and count for nothing by the rules of the history."""
OPENS_NOT = {"root of something else", "root_bytes 0", "root_bytes too small"}
"""These checkpoints are listed, but the file that they name differs."""


def _named(name: str) -> str:
    return "" if name in VOID else "root.json" if name in OPENS_NOT else NEWEST_RECORD


RAW: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("one zero byte", b"\0"),
    ("not sealed", b'{"relight":"record","version":1}\n'),
    ("50 MB of spaces", b" " * 50_000_000),
    ("sealed and over a megabyte", seal(b'{"a":"' + b"x" * (1 << 20) + b'"}')),
    ("a seal over nothing", seal(b"")),
    ("seal in upper case", seal(b'{"a":1}').upper()),
    ("seal of zeros", b'{"seal":"' + b"0" * 64 + b'","body":{"a":1}}\n'),
    ("a sealed file in a sealed file", seal(seal(b'{"a":1}')[:-1])),
]


def _fields(forge: Forge, record: str) -> Any:
    return forge.payload(SEQ[record])


def _duplicate(forge: Forge) -> None:
    payload = dumps(_fields(forge, "c"))
    forge.record(SEQ["c"], payload[:-1] + b',"seq":9}')


def _duplicate_body(forge: Forge) -> None:
    payload = dumps(_fields(forge, "c"))
    forge.record(SEQ["c"], payload.replace(b'"step":30', b'"step":20,"step":30'))


def _reframe(change: Any) -> Any:
    def make(forge: Forge) -> None:
        forge.raw_record(SEQ["c"], change(forge.files[NEWEST_RECORD]))

    return make


def _append(like: str, **fields: Any) -> Any:
    def change(record: Any) -> None:
        record["body"].update(fields.pop("body", {}))
        record.update(fields)

    return lambda forge: forge.append(change, SEQ[like])


def _other_run(count: int) -> Any:
    """Add ``count`` records of another run, in a chain of their own, after the records of this one."""

    def make(forge: Forge) -> None:
        for _ in range(count):
            forge.append(lambda record: record.update(run="f" * 32), SEQ["note"])

    return make


def _forked(forge: Forge) -> None:
    """A record of a copy of this store that went its own way: right store, run and number, another chain."""
    forge.record(SEQ["note"], lambda record: record.update(prev=HEX, writer="the copy"), chain=False)


def _fence_then_late_commit(forge: Forge) -> None:
    forge.append(lambda record: record.update(epoch=3), SEQ["fence2"])

    def late(record: Any) -> None:
        record["body"].update(id="d" * 10, dir="0000000030-dddddddddd-e2")

    forge.append(late, SEQ["c"])


def _files(forge: Forge, **files: bytes) -> None:
    forge.files.update({f"{RUN}/log/{name}.json": data for name, data in files.items()})


def _replayed_elsewhere(forge: Forge) -> None:
    forge.raw_record(SEQ["c"], forge.files[record_key(SEQ["b"])])


def _second_commit(forge: Forge) -> None:
    """The newest is committed again, with the root of another: the first stands."""
    other = forge.payload(SEQ["b"])["body"]["root"]
    forge.append(lambda record: record["body"].update(root=other), SEQ["c"])


def _swap(forge: Forge) -> None:
    a, b = record_key(SEQ["a"]), record_key(SEQ["b"])
    forge.files[a], forge.files[b] = forge.files[b], forge.files[a]


def _fence_first(forge: Forge) -> None:
    forge.record(0, lambda record: record.update(kind="FENCE", body={"attempt": "x", "reason": ""}))


def _many_ids(forge: Forge) -> None:
    forge.append(lambda record: record["body"].update(ids=[f"{n:010d}" for n in range(70_000)]), SEQ["retire"])


def _many_commits(forge: Forge) -> None:
    """Append three hundred COMMITs of absent checkpoints, and a RETIRE of seventy thousand."""
    for n in range(300):
        forge.append(lambda record, n=n: record["body"].update(id=f"{n:010d}", dir=f"0000000030-{n:010d}-e2"), SEQ["c"])
    forge.append(lambda record: record["body"].update(ids=[f"{n:010d}" for n in range(300)] * 230), SEQ["retire"])


def _prev_of_itself(forge: Forge) -> None:
    for _ in range(3):  # there is no fixed point, so the last try is used
        own = blake3(forge.files[NEWEST_RECORD]).hexdigest()
        forge.record(SEQ["c"], lambda record, own=own: record.update(prev=own))


CASES: list[Case] = [
    *(Case(f"commit: {name}", frame(field, value), "b", _named(name)) for name, field, value in FRAMES),
    *(Case(f"commit: {name}", body(field, value), "b", _named(name)) for name, field, value in BODIES),
    *(Case(f"record: {name}", lambda f, d=data: f.record(SEQ["c"], d), "b", NEWEST_RECORD) for name, data in BOMBS),
    *(Case(f"record file: {name}", lambda f, d=data: f.raw_record(SEQ["c"], d), "b", NEWEST_RECORD) for name, data in RAW),
    Case("commit: root_bytes too large", body("root_bytes", 2**40)),
    Case("commit: reason with escapes", body("reason", ANSI)),
    Case("commit: writer with escapes", frame("writer", ANSI)),
    Case("commit: a metric that is nan", body("metrics", {"loss": "nan"})),
    Case("record: duplicate key", _duplicate, "b", NEWEST_RECORD),
    Case("record: duplicate key within", _duplicate_body, "b", NEWEST_RECORD),
    Case("record file: no last newline", _reframe(lambda d: d[:-1]), "b", NEWEST_RECORD),
    Case("record file: two last newlines", _reframe(lambda d: d + b"\n"), "b", NEWEST_RECORD),
    Case("record file: a space before", _reframe(lambda d: b" " + d), "b", NEWEST_RECORD),
    Case("record file: CRLF", _reframe(lambda d: d[:-1] + b"\r\n"), "b", NEWEST_RECORD),
    Case("record file: twice", _reframe(lambda d: d + d), "b", NEWEST_RECORD),
    Case("record: prev wrong refutes the one before", frame("prev", HEX), "c", record_key(SEQ["retire"])),
    Case("record: prev zeros refutes the one before", frame("prev", "0" * 64), "c", record_key(SEQ["retire"])),
    Case("record: prev of itself", _prev_of_itself, "c", record_key(SEQ["retire"])),
    Case("record: one of a forked copy loses itself only", _forked, "c", record_key(SEQ["note"])),
    Case("record: another run's, renamed", lambda f: f.append(lambda r: r.update(run="f" * 32), SEQ["c"]), "c", "000000000010"),
    Case("record: a hundred of another run after the newest", _other_run(100), "c", "000000000010"),
    Case("record: another number's, copied", _replayed_elsewhere, "b", NEWEST_RECORD),
    Case("record: two swapped", _swap, "c", record_key(SEQ["a"])),
    Case("record: one missing", lambda f: f.files.pop(record_key(SEQ["note"])), "c", record_key(SEQ["note"])),
    Case("record: the first missing", lambda f: f.files.pop(record_key(0)), "c", record_key(0)),
    Case("record: the fence missing", lambda f: f.files.pop(record_key(SEQ["fence2"])), "c", record_key(SEQ["fence2"])),
    Case("record: number 400,000, empty", lambda f: _files(f, **{"000000400000": b""}), "c", "demo/log/000000400000.json"),
    Case("record: number 1,000,000, empty", lambda f: _files(f, **{"000001000000": b""}), "c", "demo/log/000001000000.json"),
    Case("record: number 999999999999", lambda f: _files(f, **{"999999999999": b""}), "c", "demo/log/999999999999.json"),
    Case("record: names without numbers", lambda f: _files(f, **dict.fromkeys(NO_NUMBERS, b""))),
    Case("run: its name leaves the store", lambda f: f.record(0, lambda r: r["body"].update(name="../../x"))),
    Case("run: number 0 is a fence", _fence_first, "c", record_key(0)),
    Case("run: number 0 has one before it", lambda f: f.record(0, lambda r: r.update(prev=HEX)), "c", record_key(0)),
    Case("run: a second RUN", _append("run"), "c", "000000000010"),
    Case("fence: the highest epoch there is", _append("fence", epoch=10**12 - 1), "c", "000000000010"),
    Case("fence: epoch 122 at number 10", _append("fence", epoch=122), "c", "000000000010"),
    Case("fence: epoch 121 at number 10", _append("fence", epoch=121)),
    Case("fence: epoch 2 again", _append("fence", epoch=2)),
    Case("fence: epoch 0", _append("fence", epoch=0)),
    Case("fence: reason with escapes", _append("fence", epoch=3, body={"reason": ANSI})),
    Case("fence: writer with escapes", _append("fence", epoch=3, writer=ANSI)),
    Case("fence: a commit of a lower epoch after it", _fence_then_late_commit),
    Case("commit: the same id again with another root", _second_commit),
    Case("commit: a retired one again", _append("z", epoch=1), "c"),
    Case("commit: a retired one again in this epoch", _append("z", body={"dir": "0000000005-zzzzzzzzzz-e2"}, epoch=2), "c"),
    Case("commit: a directory that is not there", _append("c", body={"id": D, "dir": f"0000000030-{D}-e2"}), "c", D),
    Case("commit: another's directory under its own id", _append("c", body={"id": "b" * 10}), "c", "000000000010"),
    Case("commit: a step beyond all", _append("c", body={"id": D, "step": FAR, "dir": f"{FAR}-{D}-e2"}), "c", D),
    Case("retire: ids leave the store", _append("retire", body={"ids": ["../../x"]}), "c", "000000000010"),
    Case("retire: ids that are not there", _append("retire", body={"ids": ["0123456789"]})),
    Case("retire: seventy thousand ids", _many_ids),
    Case("retire: seventy thousand ids of three hundred absent checkpoints", _many_commits),
    Case("retire: ids is null", _append("retire", body={"ids": None}), "c", "000000000010"),
    Case("retire: of a lower epoch", _append("retire", body={"ids": ["c" * 10]}, epoch=1)),
    Case("retire: the newest", _append("retire", body={"ids": ["c" * 10]}), "b"),
    Case("tag: name leaves the store", _append("tag", epoch=2, body={"name": "../../x"}), "c", "000000000010"),
    Case("tag: name is absolute", _append("tag", epoch=2, body={"name": "/etc/passwd"}), "c", "000000000010"),
    Case("tag: name is latest", _append("tag", epoch=2, body={"name": "latest"}), "c", "000000000010"),
    Case("tag: name is a step", _append("tag", epoch=2, body={"name": "20"}), "c", "000000000010"),
    Case("tag: name with escapes", _append("tag", epoch=2, body={"name": ANSI}), "c", "000000000010"),
    Case("tag: name empty", _append("tag", epoch=2, body={"name": ""}), "c", "000000000010"),
    Case("tag: name of half a megabyte", _append("tag", epoch=2, body={"name": "x" * 500_000}), "c", "000000000010"),
    Case("tag: id leaves the store", _append("tag", epoch=2, body={"id": "../../xxxx"}), "c", "000000000010"),
    Case("tag: id of none", _append("tag", epoch=2, body={"id": "0123456789"})),
    Case("note: data nested", _append("note", epoch=2, body={"data": {"a": {"b": 1}}}), "c", "000000000010"),
    Case("note: data is a list", _append("note", epoch=2, body={"data": [1]}), "c", "000000000010"),
    Case("note: topic with escapes", _append("note", epoch=2, body={"topic": ANSI})),
]  # fmt: skip


def _store(name: str, value: Any) -> Any:
    return lambda forge: forge.store_record(lambda record: _set(record, name, value))


STORE_FIELDS: list[tuple[str, str, Any]] = [
    ("version 0", "version", 0),
    ("version 2", "version", 2),
    ("version is text", "version", "1"),
    ("version is true", "version", True),
    ("another kind of file", "relight", "record"),
    ("id is a path", "id", "../../" + "a" * 26),
    ("id in upper case", "id", "A" * 32),
    ("id too short", "id", "a" * 31),
    ("id is a number", "id", 5),
    ("id is null", "id", None),
    ("no id", "id", MISSING),
    ("created is a number", "created", 5),
    ("an unknown field", "admin", True),
    ("an unknown field with escapes", ANSI, True),
]
CASES += [
    *(Case(f"relight.json: {name}", _store(field, value), "c", "relight.json") for name, field, value in STORE_FIELDS),
    *(Case(f"relight.json: {name}", lambda f, d=data: f.store_record(d), "c", "relight.json") for name, data in BOMBS),
    *(
        Case(f"relight.json file: {n}", lambda f, d=d: f.files.update({"relight.json": d}), "c", "relight.json")
        for n, d in RAW
    ),
    Case("relight.json: missing", lambda f: f.files.pop("relight.json"), "c", "relight.json"),
    Case("relight.json: of another store", _store("id", "e" * 32), "c"),
]
