"""Names in a store: run names, checkpoint ids, directory and file names. What does not match is refused, never cleaned up."""

from __future__ import annotations

import base64
import re
from typing import NamedTuple

from relight.errors import ConfigError, UnsafeContent
from relight.run_names import DIR_BYTES_MAX, NAME_BYTES_MAX, is_dir, run_dir

STORE_FILE = "relight.json"
STRIPE_FILE = "stripe.json"
ROOT_FILE = "root.json"
LOG_DIR = "log"
FOLDER_RECORDS = 1024
"""Records of a log in one folder. Those with lower numbers are directly in ``log/``, so that short logs need no folder."""
SUMMARY_HASH_DIGITS = 16
"""Hexadecimal digits of a summary's hash in its file name."""
STEP_MAX = 10**15
TAG_MAX = 128
BRANCH_TAGS = "branches/"
STAGES = ("candidate", "staging", "production")
"""Tags that ``relight promote`` alone moves, from the first to the last."""
"""What the tag starts with that holds a checkpoint for a branch; the branch's directory follows."""

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
_READY = re.compile(rf"(0|[1-9][0-9]{{0,6}})\.{_NUMBER}\.{_NUMBER}\.{_NUMBER}\.([A-Za-z0-9_-]{{46}}[AEIMQUYcgkosw048])"
                    rf"(?:\.{_NUMBER}\.{_NUMBER}\.{_NUMBER})?\Z")  # fmt: skip
_FAILED = re.compile(r"failed-([0-9]{5})-([a-z_]{1,40})\Z")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
PLAN_DIGITS = 6
"""So many of the hexadecimal digits that all ranks must agree on are in the names."""
READY_DIR = "ready"
"""Below a checkpoint's directory, while ranks are writing: empty files whose names say who is done, and who could not save."""
DRAFT_FILE = "draft.json"
"""The root of several ranks' checkpoint, but for its parts: what whoever comes last makes ``root.json`` of."""
RUN_ID = re.compile(r"[0-9a-f]{32}\Z")


class CheckpointDir(NamedTuple):
    """What a checkpoint directory's name says."""

    step: int
    id: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.step:010d}-{self.id}-e{self.epoch}"


def check_run_name(name: str) -> str:
    """Return the directory of run ``name``, or of the directory ``name``; ``ConfigError`` if no run may have that name."""
    try:
        return run_dir(name)
    except ValueError as error:
        raise ConfigError(
            f"{name[:300]!r} cannot be a run's name: {error}",
            hint=f"a run's name has 1 to {NAME_BYTES_MAX} bytes, starts and ends with no space, and has no slash or control character",
        ) from None


def is_run_name(name: str) -> bool:
    """Whether ``name`` may be a run's directory."""
    return is_dir(name)


def check_tag_name(name: str) -> str:
    """``name`` if it may be a tag's, else ``ConfigError``; ``latest`` and ``best`` are taken."""
    if not is_tag_name(name):
        raise ConfigError(
            f"{name[:140]!r} cannot be a tag",
            hint="letters, digits and . _ / -; not a bare number, not 'latest' or 'best'",
        )
    return name


def is_tag_name(name: str) -> bool:
    """Whether ``name`` may be a tag's."""
    length = TAG_MAX + (DIR_BYTES_MAX if name.startswith(BRANCH_TAGS) else 0)
    if len(name) > length or not _TAG.match(name):
        return False
    return name not in ("latest", "best") and not name.isdigit() and (".." not in name or name.startswith(BRANCH_TAGS))


def is_id(text: str) -> bool:
    """Whether ``text`` is a checkpoint id: ten characters from 0–9 a–z."""
    return _ID.match(text) is not None


def parse_home(directory: str) -> tuple[str, CheckpointDir] | None:
    """Run and directory of a checkpoint whose chunks another one has, as that one says it: the run is empty if it is its own. None if it
    is no such name."""
    run, slash, name = directory.rpartition("/")
    parsed = parse_dir(name)
    return None if parsed is None or (slash and not is_run_name(run)) else (run, parsed)


def parse_dir(name: str) -> CheckpointDir | None:
    """What a directory's name says, or None if it is no checkpoint directory's."""
    match = _DIR.match(name)
    if match is None:
        return None
    parsed = CheckpointDir(int(match[1]), match[2], int(match[3]))
    return parsed if str(parsed) == name else None


def record_file(seq: int) -> str:
    """The place of log record ``seq`` below ``log/``: a file, or from number 1,024 on a folder of 1,024 records and a file in it."""
    folder = record_folder(seq)
    return f"{folder}/{seq:012d}.json" if folder else flat_record_file(seq)


def flat_record_file(seq: int) -> str:
    """The file name of log record ``seq``; its place below ``log/`` in a log that an earlier version wrote without folders."""
    return f"{seq:012d}.json"


def record_folder(seq: int) -> str:
    """The folder below ``log/`` that record ``seq`` is in; empty for a record that is directly in ``log/``."""
    return folder_name(seq // FOLDER_RECORDS)


def folder_name(number: int) -> str:
    """The name of a log's folder ``number``; empty for number 0, which is ``log/`` itself."""
    return f"{number:09d}" if number > 0 else ""


def parse_record_folder(name: str) -> int | None:
    """The number of a log's folder, or None if ``name`` is not such a folder's."""
    match = _RECORD_FOLDER.match(name)
    return (int(match[1]) or None) if match else None


def parse_record_file(name: str) -> int | None:
    """The number of a log record's file, or None if it is none."""
    match = _RECORD.match(name)
    return int(match[1]) if match else None


def summary_file(upto: int, hash: str) -> str:
    """The place below ``log/`` of the summary with that hash of all records up to ``upto``: in the folder of record ``upto``."""
    name = f"summary-{upto:012d}-{hash[:SUMMARY_HASH_DIGITS]}"
    folder = record_folder(upto)
    return f"{folder}/{name}" if folder else name


def parse_summary_file(name: str) -> int | None:
    """The number of the last record that a summary covers, by its file name; None if ``name`` is not a summary's."""
    match = _SUMMARY.match(name)
    return int(match[1]) if match else None


def is_record_key(key: str) -> bool:
    """Whether a key in a store is a record's of a run's log."""
    parts = key.split("/")
    if not 3 <= len(parts) <= 4 or parts[1] != LOG_DIR:
        return False
    seq = parse_record_file(parts[-1])
    return seq is not None and (len(parts) == 3 or record_file(seq) == f"{parts[2]}/{parts[3]}")


def part_file(rank: int) -> str:
    """The file name of ``rank``'s part."""
    return f"part-{rank:05d}.msgpack"


def pack_file(rank: int, index: int) -> str:
    """The file name of ``rank``'s pack ``index``."""
    return f"pack-{rank:05d}-{index:03d}.safetensors"


def parse_pack_file(name: str) -> tuple[int, int] | None:
    """``(rank, index)`` of a file with a pack's chunks, or None if it is none."""
    match = _PACK.match(name) or _STORED.match(name)
    return (int(match[1]), int(match[2])) if match else None


def stored_file(pack: str) -> str:
    """The file beside a pack's name that holds its chunks, where they are not stored as that pack."""
    return f"{pack.removesuffix('.safetensors')}.chunks"


def is_pack_file(name: str) -> bool:
    """Whether ``name`` is one under which chunks may be stored."""
    return _PACK.match(name) is not None or _STORED.match(name) is not None


class Ready(NamedTuple):
    """What a rank says by the name of an empty file, once its part and packs are durable: all that the commit needs to know of them.

    Whoever commits reads as many names as there are ranks: they are short.
    """

    rank: int
    plan: str
    """The first ``PLAN_DIGITS`` of what all ranks must agree on: a slip of whoever told them, which nobody tries 16 million times."""
    hash: str
    """The part's."""
    size: int
    """The part's."""
    stored: int
    logical: int
    new: int | None = None
    """What of ``stored`` lies with this checkpoint, if its packs are not files as they are."""
    base: int = 0
    """The number of the COMMIT that ``donors`` goes by."""
    donors: int = 0
    """Whose bytes it needs: bit 0 is that checkpoint, bit n the n-th of those that it requires itself."""

    @property
    def file(self) -> str:
        """The file's name: rank, sizes to the base of 36, and hash and plan to that of 64."""
        proof = base64.urlsafe_b64encode(bytes.fromhex(self.hash + self.plan)).decode()[:47]
        more = "" if self.new is None else f".{base36(self.new)}.{base36(self.base)}.{base36(self.donors)}"
        return f"{self.rank}.{base36(self.size)}.{base36(self.stored)}.{base36(self.logical)}.{proof}{more}"


def parse_ready(name: str) -> Ready | None:
    """What a name says, or None if it is none of these."""
    match = _READY.match(name)
    if match is None:
        return None
    proof = base64.urlsafe_b64decode(f"{match[5]}=").hex()
    more = [int(match[number], 36) for number in (6, 7, 8)] if match[6] is not None else []
    return Ready(int(match[1]), proof[64:], proof[:64], int(match[2], 36), int(match[3], 36), int(match[4], 36), *more)


def ready_rank(name: str) -> int:
    """Whose name of a ready rank this is; −1 if it is none. Each rank looks at all names, and only the last one needs more of them."""
    match = _READY.match(name)
    return int(match[1]) if match else -1


def base36(number: int) -> str:
    """To the base of 36, as ``int(text, 36)`` reads it."""
    digits = ""
    while number >= 36:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return _DIGITS[number] + digits


def failed_file(rank: int, kind: str) -> str:
    """The name of the empty file that says that ``rank`` could not save, and the kind of its error."""
    return f"failed-{rank:05d}-{kind}"


def parse_failed(name: str) -> tuple[int, str] | None:
    """Which rank failed, and how; None if ``name`` says no such thing."""
    match = _FAILED.match(name)
    return (int(match[1]), match[2]) if match else None


def is_said_file(name: str) -> bool:
    """Whether ``name`` is one that Relight writes into ``READY_DIR``."""
    return any(pattern.match(name) for pattern in (_READY, _FAILED))


def is_written_file(name: str) -> bool:
    """Whether ``name`` is one that Relight writes into a checkpoint directory. Others are never deleted."""
    return name in (ROOT_FILE, DRAFT_FILE) or any(pattern.match(name) for pattern in (_PART, _PACK, _STORED))


def require_name(actual: str, expected: str, where: str) -> None:
    """Refuse a file name other than the only one the format allows here."""
    if actual != expected:
        raise UnsafeContent(f"names the file {actual[:80]!r} where only {expected!r} may stand", where=where)
