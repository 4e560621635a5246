"""Signed records, trusted signers, and logs that were rolled back."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from tests.encryption.test_key_ring import encrypted, save

import relight
from relight.catalog.run import open_run
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError
from relight.format.names import record_file
from relight.format.signed import apart
from relight.keys import StoreSecurity, write_key_file
from relight.keys.signing import HashSigner, signer_of, trust_of, write_signing_key
from relight.log import fold
from relight.observe import subscribe
from relight.reader import verify_checkpoint
from relight.run_records.holds import hold
from relight.store import LocalStore, MemoryStore, open_bytes
from relight.store.anchored import AnchoredStore
from relight.store.encrypted import EncryptedStore
from relight.store.signed import SignedStore
from relight.testing.store_suite import StoreSuite, refuses


@pytest.fixture(params=["ed25519", "hash"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Return the specs of the signer and of the trusted signers."""
    if request.param == "ed25519":
        public = write_signing_key(str(tmp_path / "sign.key"))
        (tmp_path / "public").write_text(public + "\n")
        return f"ed25519:file:{tmp_path / 'sign.key'}", public
    write_key_file(str(tmp_path / "shared.key"))
    return f"hash:file:{tmp_path / 'shared.key'}", f"hash:file:{tmp_path / 'shared.key'}"


class TestSigned(StoreSuite):
    """A signing store passes the store suite."""

    across_processes = False

    def make(self, tmp_path: Path) -> SignedStore:
        """Return the store over a directory."""
        tmp_path.mkdir(exist_ok=True)
        public = write_signing_key(str(tmp_path / "k"))
        return SignedStore(LocalStore(tmp_path / "s"), signer_of(f"ed25519:file:{tmp_path / 'k'}"), trust_of(public))


class TestAnchored(StoreSuite):
    """An anchored store passes the store suite."""

    def make(self, tmp_path: Path) -> AnchoredStore:
        """Return the store over a directory."""
        return AnchoredStore(LocalStore(tmp_path / "s"), LocalStore(tmp_path / "anchor"))


def records(inner: MemoryStore) -> list[str]:
    return sorted(key for key in inner._files if key.startswith("run/log/"))


def live(store: Any) -> int:
    return len(open_run(store, "run").history().live)


def test_signed_records_are_accepted(pair: tuple[str, str]) -> None:
    """Readers that trust the signer, and readers without trust=, accept it. Every record is signed."""
    inner = MemoryStore()
    store = SignedStore(inner, signer_of(pair[0]), trust_of(pair[1]))
    for step in (1, 2):
        save(store, step)
    assert all(apart(bytes(inner._files[key]), key)[1] is not None for key in records(inner))
    for reader in (store, inner, SignedStore(inner, None, trust_of(pair[1]))):
        view = open_run(reader, "run").view()
        assert not view.faults and live(reader) == 2
        assert not any(verify_checkpoint(reader, view, checkpoint) for checkpoint in fold(view).live)


def test_unsigned_records_have_no_effect(pair: tuple[str, str], tmp_path: Path) -> None:
    """A log without signatures, a log of another signer, and an unsigned record after signed ones have no effect."""
    other = signer_of(f"ed25519:file:{tmp_path / 'other'}") if write_signing_key(str(tmp_path / "other")) else None
    for signer in (None, other):
        inner = MemoryStore()
        save(SignedStore(inner, signer, None), 1)
        reader = SignedStore(inner, None, trust_of(pair[1]))
        assert open_run(reader, "run").view().faults and live(reader) == 0
    inner = MemoryStore()
    save(SignedStore(inner, signer_of(pair[0]), None), 1)
    save(inner, 2)
    reader = SignedStore(inner, None, trust_of(pair[1]))
    assert live(inner) == 2 and live(reader) == 1
    assert [checkpoint.step for checkpoint in open_run(reader, "run").history().live] == [1]


def test_a_tag_or_hold_without_a_trusted_signature_is_refused(pair: tuple[str, str]) -> None:
    """A process with trust= alone would write records that count for no process with the same trust=."""
    inner = MemoryStore()
    save(SignedStore(inner, signer_of(pair[0]), None), 1)
    before, store = records(inner), SignedStore(inner, None, trust_of(pair[1]))
    (checkpoint,) = open_run(store, "run").history().live
    with pytest.raises(ConfigError, match="no signature of a trusted signer"):
        open_run(store, "run").tag("good", checkpoint.id)
    with pytest.raises(ConfigError, match="no signature of a trusted signer"):
        hold(store, "run", checkpoint.id, "audit")
    assert records(inner) == before
    signed = SignedStore(inner, signer_of(pair[0]), trust_of(pair[1]))
    open_run(signed, "run").tag("good", checkpoint.id)
    assert open_run(store, "run").history().tags == {"good": checkpoint.id}


def test_every_bit_of_a_signed_record(pair: tuple[str, str]) -> None:
    """After a change of any bit the record has no effect, for readers that trust the signer and for readers without
    trust=.
    """
    inner = MemoryStore()
    save(SignedStore(inner, signer_of(pair[0]), None), 1)
    name = records(inner)[-1]
    whole, reader = bytes(inner._files[name]), SignedStore(inner, None, trust_of(pair[1]))
    from relight.format.records import decode_record

    seq = len(records(inner)) - 1
    for offset in range(len(whole)):
        changed = bytearray(whole)
        changed[offset] ^= 1 << offset % 8
        inner._files[name] = bytes(changed)
        refuses(RelightError, lambda: decode_record(reader.get(name, 1 << 20), seq, name))
        refuses(RelightError, lambda: decode_record(inner.get(name, 1 << 20), seq, name))
    for length in range(1, len(whole)):
        inner._files[name] = whole[:length]
        refuses(RelightError, lambda: decode_record(reader.get(name, 1 << 20), seq, name))


def test_a_log_that_an_attacker_writes_again(pair: tuple[str, str]) -> None:
    """An attacker who can write to the store replaces the log from its beginning, with correct hashes:

    every record is refused.
    """
    mine, forged = MemoryStore(), MemoryStore()
    save(SignedStore(mine, signer_of(pair[0]), None), 1)
    save(forged, 666)
    for key in list(mine._files):
        del mine._files[key]
    mine._files.update(forged._files)
    reader = SignedStore(mine, None, trust_of(pair[1]))
    assert live(mine) == 1 and live(reader) == 0


def test_specs(tmp_path: Path) -> None:
    """Errors state what is wrong with a spec, and never repeat its contents."""
    public = write_signing_key(str(tmp_path / "k"))
    (tmp_path / "public").write_text(public)
    assert trust_of(f"ed25519:file:{tmp_path / 'public'}").verifiers[0].by == trust_of(public).verifiers[0].by
    write_key_file(str(tmp_path / "shared"))
    for wrong in (
        "",
        "x",
        "ed25519:",
        "ed25519:none",
        f"ed25519:file:{tmp_path / 'shared'}",
        "hash:",
        "hash:vault:a/b",
        "rsa:file:k",
    ):
        refuses(ConfigError, lambda wrong=wrong: signer_of(wrong))  # type: ignore[misc]
    for wrong in ("", "ed25519:", "ed25519:AAAA", "ed25519:file:/none", "rsa:x", "hash:x"):
        refuses(ConfigError, lambda wrong=wrong: trust_of(wrong))  # type: ignore[misc]
    refuses(ConfigError, lambda: StoreSecurity.from_settings(sign=3))  # type: ignore[arg-type]
    secret = base64.b64decode((tmp_path / "k").read_text().strip().removeprefix("relight-signing-1:"))
    guard = StoreSecurity.from_settings(sign=f"ed25519:file:{tmp_path / 'k'}", trust=public)
    assert secret.hex() not in repr(guard) and repr(secret)[2:-1] not in repr(guard)
    received = StoreSecurity.from_wire(guard.to_wire())
    assert (
        received.trust is not None
        and received.signer is not None
        and received.trust.believes(b"x", received.signer.sign(b"x"))
    )
    assert isinstance(signer_of(f"hash:file:{tmp_path / 'shared'}"), HashSigner)


def rolled_back(inner: MemoryStore, records_left: int) -> None:
    """Roll the log back as an attacker with write access would:

    without the checkpoints that the log no longer names, and their directories.
    """
    for key in [*records(inner)[records_left:], *(key for key in inner._files if key.startswith("run/0"))]:
        del inner._files[key]


@pytest.mark.parametrize("kind", ["plain", "encrypted"])
def test_a_log_that_is_rolled_back(kind: str, key_file: str) -> None:
    """A roll-back to any earlier end is detected by a reader with the anchor, also with other records in place of the
    removed ones. Each record moves the anchor.
    """
    for left in range(5):
        anchor = MemoryStore()
        inner = MemoryStore()

        def opened(inner: MemoryStore = inner, anchor: MemoryStore = anchor) -> AnchoredStore:
            below = EncryptedStore(inner, StoreSecurity.from_settings(key_file).keys) if kind == "encrypted" else inner  # type: ignore[arg-type]
            return AnchoredStore(below, anchor)

        for step in (1, 2):
            save(opened(), step)
        count = len(records(inner))
        assert count == 5 and live(opened()) == 2 and len(anchor._files) == 1
        rolled_back(inner, left)
        error = refuses(CorruptCheckpoint, lambda: open_run(opened(), "run"))
        assert "rolled back" in error.what or left == 0
        save(opened().inner, 7)
        if len(records(inner)) < count:
            save(opened().inner, 8)
        if len(records(inner)) >= count:
            refuses(CorruptCheckpoint, lambda: open_run(opened(), "run"))
        refuses(CorruptCheckpoint, lambda: save(opened(), 9))


def test_an_anchor_that_does_not_answer_prevents_no_save(tmp_path: Path) -> None:
    """The failure is reported, and the anchor is written again at the next record."""

    class Unreachable(MemoryStore):
        def put_once(self, key: str, data: bytes) -> bool:
            raise relight.StoreUnavailable("no")

    seen: list[str] = []
    undo = subscribe(lambda event: seen.append(event.name))
    store = AnchoredStore(MemoryStore(), Unreachable())
    save(store, 1)
    undo()
    assert live(store) == 1 and seen.count("anchor.failed") >= 2


def test_all_of_it_in_training(tmp_path: Path, key_file: str) -> None:
    """Runs are encrypted, signed and anchored, by the settings alone, with and without the agent.

    With the wrong trust there is nothing to resume from.
    """
    import torch

    public = write_signing_key(str(tmp_path / "sign"))
    guarded = {
        "encrypt": key_file,
        "sign": f"ed25519:file:{tmp_path / 'sign'}",
        "trust": public,
        "anchor": tmp_path / "anchor",
    }
    for background in (False, True):
        model = torch.nn.Linear(9, 9)
        options: dict[str, Any] = {"model": model, "save": relight.every(steps=1), "background": background, **guarded}
        with relight.Checkpointer(tmp_path / "s" / "run", **options) as ckpt:
            start = ckpt.restore()
            ckpt.save(start)
    store = open_bytes(tmp_path / "s", guard=StoreSecurity.from_settings(**guarded))
    assert live(store) == 2 and not open_run(store, "run").view().faults
    assert any((tmp_path / "anchor").rglob("0*"))
    other = write_signing_key(str(tmp_path / "another"))
    assert (
        live(open_bytes(tmp_path / "s", guard=StoreSecurity.from_settings(**{**guarded, "trust": other, "anchor": ""})))
        == 0
    )
    (tmp_path / "s" / "run" / "log" / record_file(len(list((tmp_path / "s" / "run" / "log").iterdir())) - 1)).unlink()
    refuses(CorruptCheckpoint, lambda: relight.Checkpointer(tmp_path / "s" / "run", **options).restore())


def test_a_reader_without_keys_gets_an_error(key_file: str) -> None:
    """Nothing of an encrypted store is listed without the key."""
    inner = encrypted(key_file)
    refuses(RelightError, lambda: open_run(inner, "run").view().records[0])
    refuses(
        CheckpointNotFound, lambda: open_run(EncryptedStore(inner, StoreSecurity.from_settings(key_file).keys), "none")
    )  # type: ignore[arg-type]
