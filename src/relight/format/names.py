"""Names in a store: run names, checkpoint ids, directory and file names. An invalid name is refused, never corrected."""

from __future__ import annotations

import base64
import re
from typing import NamedTuple

from relight.errors import ConfigError, UnsafeContent, shown
from relight.run_names import DIR_BYTES_MAX, NAME_BYTES_MAX, is_dir, run_dir

STORE_FILE = "relight.json"
STRIPE_FILE = "stripe.json"
MIRRORS_FILE = re.compile(r"mirrors-([0-9]{12})\.json\Z")
"""Name of a state of a mirrored store's drives, with the state's number."""
ROOT_FILE = "root.json"
LOG_DIR = "log"
FOLDER_RECORDS = 1024
"""Records of a log in one folder. Those with lower numbers are directly in ``log/``, so that short logs need no folder."""
SUMMARY_HASH_DIGITS = 16
"""Hexadecimal digits of a summary's hash in its file name."""
STEP_MAX = 10**15
TAG_MAX = 128
BRANCH_TAGS = "branches/"
"""Prefix of a tag that keeps a checkpoint for a branch; the branch's directory follows."""
STAGES = ("candidate", "staging", "production")
"""Tags that only ``relight tag --stage`` moves, from the first to the last."""

_ID = re.compile(r"[0-9a-z]{10}\Z")
_DIR = re.compile(r"([0-9]{10,16})-([0-9a-z]{10})-e(0|[1-9][0-9]{0,11})\Z")
_RECORD = re.compile(r"([0-9]{12})\.json\Z")
_RECORD_FOLDER = re.compile(r"([0-9]{9})\Z")
_SUMMARY = re.compile(r"summary-([0-9]{12})-([0-9a-f]{16})\Z")
_PART = re.compile(r"part-([0-9]{5})\.msgpack\Z")
_PACK = re.compile(r"pack-([0-9]{5})-([0-9]{3})\.safetensors\Z")
_STORED = re.compile(r"pack-([0-9]{5})-([0-9]{3})\.chunks\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]*\Z")
_NUMBER = "(0|[1-9a-z][0-9a-z]{0,11})"
_READY = re.compile(
    rf"(0|[1-9][0-9]{{0,6}})\.{_NUMBER}\.{_NUMBER}\.{_NUMBER}\.([A-Za-z0-9_-]{{46}}[AEIMQUYcgkosw048])"
    rf"(?:\.{_NUMBER}\.{_NUMBER}\.{_NUMBER})?\Z"
)
_FAILED = re.compile(r"failed-([0-9]{5})-([a-z_]{1,40})\Z")
_TAKEN = re.compile(r"(taken|freed)-([0-9]{5})-([0-9]{3})\Z")
_COPIED = re.compile(r"copied-([0-9]{5})\Z")
_COPYING_NODE = re.compile(r"node-[0-9a-z]{10}\Z")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
PLAN_DIGITS = 6
"""Hexadecimal digits in a ready file's name of the hash that all ranks must agree on."""
READY_DIR = "ready"
"""Directory in a checkpoint's directory while ranks write: the names of its empty files state which ranks are ready or have failed."""
DRAFT_FILE = "draft.json"
"""The root of a checkpoint of several ranks, without its parts. The rank that commits adds the parts and writes ``root.json``."""
RUN_ID = re.compile(r"[0-9a-f]{32}\Z")


class CheckpointDir(NamedTuple):
    """Fields in the name of a checkpoint's directory."""

    step: int
    id: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.step:010d}-{self.id}-e{self.epoch}"


def check_run_name(name: str) -> str:
    """Return the directory of a run; ``name`` may also be that directory. Raise ``ConfigError`` for an invalid name."""
    try:
        return run_dir(name)
    except ValueError as error:
        raise ConfigError(
            f"{shown(name)} cannot be a run's name: {error}",
            hint=f"a run's name has 1 to {NAME_BYTES_MAX} bytes, no space at its start or end, and no slash or control character",
        ) from None


def is_run_name(name: str) -> bool:
    """Return whether ``name`` is a valid name of a run's directory."""
    return is_dir(name)


def check_tag_name(name: str) -> str:
    """Return ``name`` if it is a valid tag; otherwise raise ``ConfigError``. ``latest`` and ``best`` are reserved."""
    if not is_tag_name(name):
        raise ConfigError(
            f"{name[:140]!r} cannot be a tag",
            hint="letters, digits and . _ / -; not a bare number, 'latest', 'best' or step=N: these name checkpoints already",
        )
    return name


def is_tag_name(name: str) -> bool:
    """Return whether ``name`` is a valid tag."""
    length = TAG_MAX + (DIR_BYTES_MAX if name.startswith(BRANCH_TAGS) else 0)
    if len(name) > length or not _TAG.match(name):
        return False
    return name not in ("latest", "best") and not name.isdigit() and (".." not in name or name.startswith(BRANCH_TAGS))


def is_id(text: str) -> bool:
    """Return whether ``text`` is a checkpoint id: ten characters from 0–9 a–z."""
    return _ID.match(text) is not None


def parse_home(directory: str) -> tuple[str, CheckpointDir] | None:
    """Parse the place of a donor, ``DIRECTORY`` or ``RUN/DIRECTORY``: return its run ("" for the same run) and directory.

    None if it is invalid.
    """
    run, slash, name = directory.rpartition("/")
    parsed = parse_dir(name)
    return None if parsed is None or (slash and not is_run_name(run)) else (run, parsed)


def parse_dir(name: str) -> CheckpointDir | None:
    """Parse the name of a checkpoint's directory. Return None for other names."""
    match = _DIR.match(name)
    if match is None:
        return None
    parsed = CheckpointDir(int(match[1]), match[2], int(match[3]))
    return parsed if str(parsed) == name else None


def record_file(seq: int) -> str:
    """Return the path of log record ``seq`` in ``log/``: a file, or from number 1,024 on a file in a folder of 1,024 records."""
    folder = record_folder(seq)
    return f"{folder}/{seq:012d}.json" if folder else flat_record_file(seq)


def flat_record_file(seq: int) -> str:
    """Return the file name of log record ``seq``. It is also its path in ``log/`` if an earlier version wrote the log, without folders."""
    return f"{seq:012d}.json"


def record_folder(seq: int) -> str:
    """Return the folder in ``log/`` of record ``seq``; "" for a record directly in ``log/``."""
    return folder_name(seq // FOLDER_RECORDS)


def folder_name(number: int) -> str:
    """Return the name of a log's folder ``number``; "" for number 0, which is ``log/`` itself."""
    return f"{number:09d}" if number > 0 else ""


def parse_record_folder(name: str) -> int | None:
    """Return the number of a log's folder; None if ``name`` is not the name of such a folder."""
    match = _RECORD_FOLDER.match(name)
    return (int(match[1]) or None) if match else None


def parse_record_file(name: str) -> int | None:
    """Return the number of a log record from its file name; None for other names."""
    match = _RECORD.match(name)
    return int(match[1]) if match else None


def summary_file(upto: int, hash: str) -> str:
    """Return the path in ``log/`` of the summary with this hash of all records up to ``upto``: in the folder of record ``upto``."""
    name = f"summary-{upto:012d}-{hash[:SUMMARY_HASH_DIGITS]}"
    folder = record_folder(upto)
    return f"{folder}/{name}" if folder else name


def parse_summary_file(name: str) -> int | None:
    """Return the number of the last record that a summary covers, from its file name; None for other names."""
    match = _SUMMARY.match(name)
    return int(match[1]) if match else None


def is_record_key(key: str) -> bool:
    """Return whether a key in a store is the key of a record of a run's log."""
    parts = key.split("/")
    if not 3 <= len(parts) <= 4 or parts[1] != LOG_DIR:
        return False
    seq = parse_record_file(parts[-1])
    return seq is not None and (len(parts) == 3 or record_file(seq) == f"{parts[2]}/{parts[3]}")


def part_file(rank: int) -> str:
    """Return the file name of ``rank``'s part."""
    return f"part-{rank:05d}.msgpack"


def pack_file(rank: int, index: int) -> str:
    """Return the file name of ``rank``'s pack ``index``."""
    return f"pack-{rank:05d}-{index:03d}.safetensors"


def parse_pack_file(name: str) -> tuple[int, int] | None:
    """Return ``(rank, index)`` from the name of a file with a pack's chunks; None for other names."""
    match = _PACK.match(name) or _STORED.match(name)
    return (int(match[1]), int(match[2])) if match else None


def stored_file(pack: str) -> str:
    """Return the name of the file with a pack's chunks, if they are not stored as that pack."""
    return f"{pack.removesuffix('.safetensors')}.chunks"


def is_pack_file(name: str) -> bool:
    """Return whether ``name`` is one under which chunks may be stored."""
    return _PACK.match(name) is not None or _STORED.match(name) is not None


class Ready(NamedTuple):
    """Everything that a commit needs to know about a rank's part and packs, once they are durable: the name of an empty file.

    The committing rank reads one name for each rank, so the names are short.
    """

    rank: int
    plan: str
    """The first ``PLAN_DIGITS`` of the hash that all ranks must agree on. They detect mistakes; they are no protection from an attack."""
    hash: str
    """Hash of the part."""
    size: int
    """Bytes of the part."""
    stored: int
    logical: int
    new: int | None = None
    """The part of ``stored`` in this checkpoint's own files; None if its packs are plain files."""
    base: int = 0
    """Number of the COMMIT record to which ``donors`` refers."""
    donors: int = 0
    """Bit field of the checkpoints that donate bytes: bit 0 is the checkpoint of ``base``, bit n the n-th checkpoint that it requires."""

    @property
    def file(self) -> str:
        """Name of the file: rank, sizes in base 36, and hash and plan in base 64."""
        proof = base64.urlsafe_b64encode(bytes.fromhex(self.hash + self.plan)).decode()[:47]
        more = "" if self.new is None else f".{base36(self.new)}.{base36(self.base)}.{base36(self.donors)}"
        return f"{self.rank}.{base36(self.size)}.{base36(self.stored)}.{base36(self.logical)}.{proof}{more}"


def parse_ready(name: str) -> Ready | None:
    """Parse the name of a ready file. Return None for other names."""
    match = _READY.match(name)
    if match is None:
        return None
    proof = base64.urlsafe_b64decode(f"{match[5]}=").hex()
    more = [int(match[number], 36) for number in (6, 7, 8)] if match[6] is not None else []
    return Ready(int(match[1]), proof[64:], proof[:64], int(match[2], 36), int(match[3], 36), int(match[4], 36), *more)


def ready_rank(name: str) -> int:
    """Return the rank in the name of a ready file; −1 for other names. Cheaper than ``parse_ready``: every rank reads all names."""
    match = _READY.match(name)
    return int(match[1]) if match else -1


def base36(number: int) -> str:
    """Return ``number`` in base 36, as ``int(text, 36)`` parses it."""
    digits = ""
    while number >= 36:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return _DIGITS[number] + digits


def failed_file(rank: int, kind: str) -> str:
    """Return the name of the empty file that states that ``rank`` could not save, and the kind of its error."""
    return f"failed-{rank:05d}-{kind}"


def parse_failed(name: str) -> tuple[int, str] | None:
    """Return the failed rank and the kind of its error from a file's name; None for other names."""
    match = _FAILED.match(name)
    return (int(match[1]), match[2]) if match else None


def taken_file(part: int, attempt: int) -> str:
    """Return the name of the file that states that a node copies this part to a further tier. ``attempt`` counts from 0."""
    return f"taken-{part:05d}-{attempt:03d}"


def freed_file(part: int, attempt: int) -> str:
    """Return the name of the file that states that the node of this attempt copies the part no more."""
    return f"freed-{part:05d}-{attempt:03d}"


def parse_taken(name: str) -> tuple[int, int, bool] | None:
    """Return the part, the attempt and whether it was freed, from a file's name; None for other names."""
    match = _TAKEN.match(name)
    return (int(match[2]), int(match[3]), match[1] == "freed") if match else None


def copied_file(part: int) -> str:
    """Return the name of the file that states that this part is in a further tier."""
    return f"copied-{part:05d}"


def parse_copied(name: str) -> int | None:
    """Return the part from a file's name; None for other names."""
    match = _COPIED.match(name)
    return int(match[1]) if match else None


def copying_node_file(node: str) -> str:
    """Return the name of the file that states that a node takes part in a copy. ``node``: ten characters from 0–9 a–z."""
    return f"node-{node}"


def is_copying_node_file(name: str) -> bool:
    """Return whether ``copying_node_file`` returns such a name."""
    return _COPYING_NODE.match(name) is not None


def is_announcement_file(name: str) -> bool:
    """Return whether ``name`` is a name that Relight writes in ``READY_DIR``."""
    return any(pattern.match(name) for pattern in (_READY, _FAILED, _TAKEN, _COPIED, _COPYING_NODE))


def is_written_file(name: str) -> bool:
    """Return whether ``name`` is a name that Relight writes in a checkpoint's directory. Other files are never deleted."""
    return name in (ROOT_FILE, DRAFT_FILE) or any(pattern.match(name) for pattern in (_PART, _PACK, _STORED))


def require_name(actual: str, expected: str, where: str) -> None:
    """Raise ``UnsafeContent`` if a file name is not the only one that the format allows here."""
    if actual != expected:
        raise UnsafeContent(f"names the file {actual[:80]!r}; the format allows only {expected!r}", where=where)
