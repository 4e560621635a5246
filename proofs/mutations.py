"""Edits of the source, one at a time, that some proof must detect: the table of ``proofs.mutation_check``."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """Replace ``old`` by ``new`` in ``module``. ``what``: what is removed. ``proof``: the proof most likely to fail."""

    what: str
    module: str
    old: str
    new: str
    proof: str = "cuts"


DURABLE, LOCAL, CHAIN, HISTORY = (
    "relight.store.durable",
    "relight.store.local",
    "relight.log.log",
    "relight.log.history",
)
SUMMARY, SUMMARIZING, LISTING, SLOTS = (
    "relight.log.summary",
    "relight.log.summarizing",
    "relight.log.listing",
    "relight.log.slots",
)
BASE = "relight.store.base"
TRUNCATED = "relight.log.truncated"
SAVE, PRUNE, SWEEP, KEEP = (
    "relight.commit.save",
    "relight.reclaim.prune",
    "relight.reclaim.sweep",
    "relight.policy.keep",
)
DISK, READ, OPENED, VERIFY = (
    "relight.store.disk",
    "relight.reader.chunk_reader",
    "relight.reader.opened",
    "relight.reader.verify",
)
MANIFEST, STRICT, RECORDS, PACKS = (
    "relight.format.manifest",
    "relight.format.strict",
    "relight.format.records",
    "relight.commit.pack_writer",
)

MUTATIONS: tuple[Mutation, ...] = (
    # durability
    Mutation("fsync of a new file", DURABLE, "            self._disk.fsync(self._fd)\n", ""),
    Mutation("fsync of a directory, everywhere", DURABLE, "            disk.fsync(fd)\n", "            pass\n"),
    Mutation(
        "fsync of the log's directory after the link",
        DURABLE,
        "            sync_dir(disk, directory)\n",
        "            pass\n",
    ),
    Mutation("fsync of a new directory's parent", DURABLE, "        sync_dir(disk, os.path.dirname(new))\n", ""),
    Mutation(
        "fsync of the parent of a directory that another made meanwhile",
        DURABLE,
        '            pass\n        except OSError as error:\n            raise translate(error, "making a directory", new)',
        '            continue\n        except OSError as error:\n            raise translate(error, "making a directory", new)',
        "rules",
    ),
    Mutation("fsync of the checkpoint's directory", SAVE, "    place.store.sync(prefix)\n", ""),
    Mutation(
        "making the log durable before relying on it",
        CHAIN,
        "            self._folders.sync(view.head)\n\n",
        "            pass\n\n",
        "rules",
    ),
    Mutation(
        "the folder of the head is made durable with it",
        LISTING,
        "        if folder != self.place:\n            self._store.sync(self.place)\n",
        "",
        "rules",
    ),
    Mutation(
        "a summary's bytes are those that the NOTE names",
        SUMMARIZING,
        "                if hexdigest(data) != hash:\n",
        "                if False:\n",
        "rules",
    ),
    Mutation(
        "a NOTE that does not count vouches for no summary",
        CHAIN,
        "if is_chained and any(record.seq == note.seq for record in view.newer):",
        "if is_chained:",
        "rules",
    ),
    Mutation(
        "a summary keeps the lines of descent",
        SUMMARY,
        "        lines=_lines(history, kept, {fence.epoch for fence in fences}),\n",
        "",
        "rules",
    ),
    Mutation(
        "a stray record is not the head",
        LISTING,
        "return (order[: begins[0]], order[begins[0] :]) if begins else (order, [])",
        "return order, []",
        "rules",
    ),
    Mutation(
        "making store and run durable before the first append",
        CHAIN,
        "                self._store.sync(prefix)\n",
        "                pass\n",
        "early",
    ),
    Mutation(
        "making them durable once more, if they were new",
        CHAIN,
        "            self._settled = len(existing) == 2",
        "            self._settled = True",
        "rules",
    ),
    Mutation(
        "making the directories above the store durable",
        LOCAL,
        "                sync_dir(self._disk, path)\n",
        "                pass\n",
        "early",
    ),
    Mutation(
        "the checked close",
        DURABLE,
        '            self._disk.close(fd)\n        except OSError as error:\n            raise translate(error, "making a file',
        '            with contextlib.suppress(OSError):\n                self._disk.close(fd)\n        except OSError as error:\n            raise translate(error, "making a file',
        "faults",
    ),
    Mutation(
        "reserving room",
        DURABLE,
        "                    disk.fallocate(self._fd, size)\n",
        "                    pass\n",
        "suite",
    ),
    Mutation(
        "continuing after a short write",
        DURABLE,
        "                data, offset = data[written:], offset + written\n",
        "                break\n",
        "suite",
    ),
    Mutation(
        "removing the file of a failed write",
        DURABLE,
        "        with contextlib.suppress(OSError):\n            self._disk.unlink(self._path)\n",
        "        pass\n",
        "faults",
    ),
    Mutation(
        "removing the temporary",
        DURABLE,
        "        with contextlib.suppress(OSError):\n            disk.unlink(temporary)\n",
        "        pass\n",
        "suite",
    ),
    Mutation(
        "a failed fsync is final: trying it again",
        DURABLE,
        "            self._disk.fsync(self._fd)\n",
        "            try:\n                self._disk.fsync(self._fd)\n            except OSError:\n                self._disk.fsync(self._fd)\n",
        "faults",
    ),
    Mutation(
        "translating errors of the disk",
        DURABLE,
        '        except OSError as error:\n            raise translate(error, "reading the attributes of a file", path) from error\n',
        "",
        "faults",
    ),
    # exclusive creation
    Mutation(
        "link: rename replaces instead",
        DISK,
        "        os.link(source, target)\n",
        "        os.rename(source, target)\n",
        "suite",
    ),
    Mutation("O_EXCL", DISK, "os.O_CREAT | os.O_EXCL |", "os.O_CREAT |", "suite"),
    Mutation(
        "the link count that shows a lost reply",
        DURABLE,
        "        if links == 2:\n            return True\n",
        "",
        "rules",
    ),
    Mutation(
        "losing a race after the temporary was swept",
        DURABLE,
        "            if holder is not None:",
        "            if False:",
        "rules",
    ),
    Mutation(
        "O_NOFOLLOW when reading",
        DISK,
        "os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_CLOEXEC | os.O_NONBLOCK",
        "rules",
    ),
    Mutation(
        "refusing links in the middle of a path",
        LOCAL,
        "            if not stat.S_ISDIR(mode):\n",
        "            if False:\n",
        "rules",
    ),
    Mutation(
        "only regular files are read",
        DURABLE,
        "        if not stat.S_ISREG(status.st_mode):\n",
        "        if False:\n",
        "rules",
    ),
    Mutation(
        "names that leave the store",
        BASE,
        '    if key and any(part in ("", ".", "..") or',
        "    if key and any(part in () or",
        "suite",
    ),
    Mutation(
        "the limit of small files",
        BASE,
        "            if reader.size > limit:\n",
        "            if False:\n",
        "suite",
    ),
    # the log
    Mutation(
        "the seal",
        STRICT,
        "    if data[len(_HEAD) : len(_HEAD) + 64] != hexdigest(payload).encode():\n",
        "    if False:\n",
        "rules",
    ),
    Mutation(
        "the chain",
        SLOTS,
        "    if following is not None and following.prev != slot.file_hash:\n",
        "    if False:\n",
        "rules",
    ),
    Mutation(
        "the store that a record names", SLOTS, "    if slot.record.store != store_id:\n", "    if False:\n", "rules"
    ),
    Mutation("the run that a record names", SLOTS, "    if slot.record.run != run_id:\n", "    if False:\n", "rules"),
    Mutation("the number that a record names", RECORDS, "    if frame.seq != seq:\n", "    if False:\n", "rules"),
    Mutation(
        "no record is chained after an unreadable one",
        CHAIN,
        "        if unread is not None:  # it may be a FENCE, or the same COMMIT that is being appended\n",
        "        if False:\n",
        "rules",
    ),
    Mutation(
        "reading the log again when the number is taken",
        CHAIN,
        "        if not created and not self._is_ours(key, data):\n            return None\n",
        "",
        "takeovers",
    ),
    Mutation(
        "the fence, in every reader",
        HISTORY,
        "            if record.epoch < history.epoch:\n",
        "            if False:\n",
        "rules",
    ),
    Mutation(
        "a directory belongs to its epoch",
        HISTORY,
        "        if parsed is None or (parsed.epoch != record.epoch and not body.home):\n",
        "        if parsed is None:\n",
        "rules",
    ),
    Mutation(
        "a retirement is final",
        HISTORY,
        "        elif _is_repeated(history, body.id, record.seq):\n",
        "        elif False:\n",
        "rules",
    ),
    # commit
    Mutation("the fence, before a commit", SAVE, "        refuse_if_fenced(view, place.epoch)\n", "", "rules"),
    Mutation(
        "a higher epoch for each attempt",
        "relight.commit.attempt",
        "return history.epoch + 1 + later",
        "return history.epoch",
        "rules",
    ),
    Mutation(
        "reading back before the commit",
        SAVE,
        "    root_hash, root_bytes = check_written(place.store, prefix, root, known)\n",
        "    root_hash, root_bytes = hexdigest(encode_root(root)), len(encode_root(root))\n",
        "rules",
    ),
    Mutation(
        "the size of packs before the commit",
        SAVE,
        "            if reader.size != pack.new_bytes:\n",
        "            if False:\n",
        "rules",
    ),
    Mutation(
        "files of an uncertain save are not deleted",
        SAVE,
        " and not isinstance(error, Uncertain)):\n",
        "):\n",
        "faults",
    ),
    Mutation(
        "files of a save interrupted while committing are not deleted",
        SAVE,
        "        if not committing or (isinstance",
        "        if True or (isinstance",
        "deaths",
    ),
    Mutation(
        "files of a failed save are deleted",
        SAVE,
        "                delete_directory(place.store, prefix)\n        raise\n",
        "                pass\n        raise\n",
        "faults",
    ),
    Mutation(
        "unsynced directory entry of a commit is uncertain",
        DURABLE,
        '            raise Uncertain(f"created, but',
        '            raise StoreUnavailable(f"created, but',
        "faults",
    ),
    Mutation(
        "files that Relight did not write stay",
        SAVE,
        "        if not entry.is_dir and (\n"
        "            is_written_file(rewritten_of(entry.name) or entry.name)\n"
        "            or temporary_of(entry.name) in (ROOT_FILE, DRAFT_FILE)\n"
        "        ):\n",
        "        if not entry.is_dir:\n",
        "rules",
    ),
    Mutation(
        "commit last: the record before the root is durable",
        SAVE,
        "        root, part, data = _write(place, request, plan, directory, prefix, timings)\n        digest = trainable_digest(plan, part.packs)\n        committing = True\n        proven = plan.proven and all(pack.stored is None for pack in part.packs)\n        record = _commit(place, root, prefix, str(directory), timings, {part_file(0): (part, data)} if proven else {})\n",
        "        real = place.store.sync\n        place.store.sync = lambda prefix: None\n        root, part, data = _write(place, request, plan, directory, prefix, timings)\n        digest = trainable_digest(plan, part.packs)\n        place.store.sync = real\n        committing = True\n        record = _commit(place, root, prefix, str(directory), timings, {})\n        place.store.sync(prefix)\n",
        "cuts",
    ),
    # reading
    Mutation("the root's hash", MANIFEST, "    if hexdigest(data) != expected_hash:\n", "    if False:\n", "rules"),
    Mutation(
        "the part's hash",
        MANIFEST,
        "    if len(data) != ref.size or hexdigest(data) != ref.hash:\n",
        "    if False:\n",
        "rules",
    ),
    Mutation(
        "the chunk's hash, when restoring",
        READ,
        "    if Digest(data).digest() != want.hash:\n",
        "    if False:\n",
        "rules",
    ),
    Mutation(
        "the chunk's hash, when verifying",
        READ,
        "        if not _is_sound(reader, offset, data, pack.chunks[number][1], key):\n",
        "        if False:\n",
        "rules",
    ),
    Mutation(
        "the pack's length, when restoring",
        READ,
        "            if reader.size == pack.size:\n",
        "            if True:\n",
        "rules",
    ),
    # reclaiming
    Mutation(
        "retire, then delete",
        PRUNE,
        "    if going and log.append(decide) is not None and not undo_s:\n",
        "    delete_checkpoints(store, plan.run, type(fold(log.read()))(retired={c.id: c for c in fold(log.read()).live}), plan.going)\n    if going and log.append(decide) is not None and not undo_s:\n",
        "deaths",
    ),
    Mutation(
        "a superseded attempt prunes nothing",
        PRUNE,
        "        if epoch is not None and history.epoch > epoch:\n",
        "        if False:\n",
        "rules",
    ),
    Mutation("a checkpoint tagged meanwhile stays", PRUNE, " and not history.tags_of(checkpoint.id)", "", "rules"),
    Mutation(
        "the newest stays, when the plan is executed",
        PRUNE,
        "for checkpoint in history.live[:-1]",
        "for checkpoint in history.live",
        "rules",
    ),
    Mutation(
        "a plan is void when the checkpoint that it relies on is gone",
        PRUNE,
        "        if plan.relies_on and not any(",
        "        if False and not any(",
        "rules",
    ),
    Mutation(
        "the newest stays, in the plan",
        KEEP,
        "    for checkpoint in counted[:1]:\n",
        "    for checkpoint in ():\n",
        "rules",
    ),
    Mutation("the newest that verifies stays", KEEP, "    if newest_verified:\n", "    if False:\n", "rules"),
    Mutation(
        "damaged ones do not fill the quota",
        KEEP,
        "    sound = [checkpoint for checkpoint in counted if checkpoint.verified is not False]\n",
        "    sound = counted\n",
        "rules",
    ),
    Mutation(
        "nothing is retired if nothing verifies",
        KEEP,
        "    if not any(checkpoint.verified and reasons[checkpoint.id] for checkpoint in checkpoints):\n",
        "    if False:\n",
        "rules",
    ),
    Mutation(
        "a damaged record stops the sweep", SWEEP, "        elif view.damaged:\n", "        elif False:\n", "rules"
    ),
    Mutation(
        "only superseded attempts are swept",
        SWEEP,
        "        elif parsed.epoch < history.epoch:\n",
        "        elif parsed.epoch <= history.epoch:\n",
        "rules",
    ),
    Mutation(
        "live ones are not swept",
        SWEEP,
        "        if parsed is None or name in live:\n",
        "        if parsed is None:\n",
        "deaths",
    ),
    Mutation(
        "leftovers are swept",
        SWEEP,
        '            going.append((name, f"left by',
        '            kept.append((name, f"left by',
        "deaths",
    ),
    Mutation("temporaries are swept", SWEEP, "            store.delete(key)\n", "            pass\n", "deaths"),
    # lost logs, lines of descent
    Mutation(
        "a missing log stops a start",
        CHAIN,
        "            view = self._view_or_refuse()\n",
        "            pass\n",
        "rules",
    ),
    Mutation(
        "a truncated log stops a start",
        "relight.commit.attempt",
        "        refuse_truncated(store, log, log.start())\n",
        "        log.start()\n",
        "rules",
    ),
    Mutation(
        "a FENCE that was lost is noticed",
        TRUNCATED,
        "        if parsed.epoch > epoch:\n",
        "        if False:\n",
        "rules",
    ),
    Mutation(
        "a COMMIT that was lost is noticed",
        TRUNCATED,
        '{parent for parent in root["parents"] if parent not in known}',
        "set()",
        "rules",
    ),
    Mutation(
        "an interrupted rebuild stops a start",
        TRUNCATED,
        "if not lost and not is_being_rebuilt(view) and not (",
        "if not lost and not (",
        "rules",
    ),
    Mutation(
        "checkpoints that are not ancestors stay, in the plan",
        KEEP,
        "        if checkpoint.abandoned and not checkpoint.aside and not rules.prune_abandoned\n",
        "        if False\n",
        "rules",
    ),
    Mutation(
        "checkpoints that are not ancestors stay, when the plan is executed",
        PRUNE,
        "not_needed(history, set(free) - abandoned)",
        "not_needed(history, set(free))",
        "rules",
    ),
    # hashing while writing
    Mutation(
        "a piece begins where the one before it ended",
        PACKS,
        "        copy_from(source, start, buffer[filled : filled + length])\n",
        "        copy_from(source, 0, buffer[filled : filled + length])\n",
        "rules",
    ),
    Mutation(
        "a pack in memory is written from its current offset",
        PACKS,
        "image[offset : offset + padded])\n",
        "image[:padded])\n",
        "rules",
    ),
    Mutation(
        "a chunk of a pack in memory is hashed in place", PACKS, "image[begin:end]", "image[: end - begin]", "rules"
    ),
    Mutation("the hash of each chunk is its own", PACKS, "jobs.popleft().result()", "jobs.pop().result()", "rules"),
)
