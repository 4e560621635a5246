"""Find a loader's position again under its present settings.

Same settings: the delivered batches are read again from the same generators, and dropped. Other settings, and the
order of samples is known: as many samples are skipped in the order, and no data is read. A stream with another batch
size: the delivered batches are read again in the old size. In each case the checksum of the skipped samples must equal
the stored one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader

from relight.capture import rng as generators
from relight.capture.delivered import Position, Skipped, is_drawn_by, sized
from relight.capture.loader_watch import (
    END,
    Epoch,
    RemainingSamples,
    WatchedLoader,
    epoch_number,
    is_stateful,
    leave_rest,
    make_iterator,
    own_states,
    restore_epoch_start,
    set_epoch_number,
    set_own_states,
)
from relight.capture.units import changed, core_of, cuts_plainly, has_shuffle_buffer, units_of
from relight.errors import IncompatibleState
from relight.observe import emit
from relight.torch_private.loaders import has_persistent_workers
from relight.torch_private.torchdata import sampler_state

WAYS = (
    "give the loader its old settings; or restore(strict=False), or relight.capture.reset_position(loader) before restore(): "
    "the training epoch then begins from its start"
)


def resumed(pending: Mapping[str, Any], watch: WatchedLoader, loader: DataLoader[Any]) -> Epoch:
    """Return the interrupted epoch as it continues in this process."""
    epoch = Epoch(
        pending["start"], pending["first"], pending["delivered"], 0 if watch.rest is None else watch.rest.begins
    )
    epoch.resumed, epoch.units, epoch.mixed = pending["delivered"], units_of(loader), bool(pending.get("mixed"))
    checksum = pending.get("checksum")
    if isinstance(checksum, int):
        epoch.position = Position(pending.get("samples"), checksum, pending.get("failed", 0))
    return epoch


def attempts_of(pending: Mapping[str, Any]) -> int:
    """Return the number of batches that were delivered, or that could not be read and were left out by the loop."""
    return int(pending["delivered"]) + int(pending.get("failed", 0))


def by_samples(loader: DataLoader[Any], pending: Mapping[str, Any]) -> bool:
    """Return whether the position is found by counting samples: the order is known, and a setting has changed."""
    stored, live = pending.get("units"), units_of(loader)
    if (
        not isinstance(stored, Mapping)
        or not isinstance(pending.get("samples"), int)
        or live["stream"]
        or stored.get("stream")
    ):
        return False
    if is_stateful(loader) and not (
        cuts_plainly(core_of(loader).batch_sampler) or core_of(loader).batch_sampler is None
    ):
        return False
    names = ("workers",) if is_stateful(loader) else ("batch_size", "drop_last", "workers", "batch_sampler")
    return bool(pending.get("mixed")) or any(stored.get(name) != live[name] for name in names)


def reposition(
    loader: DataLoader[Any], watch: WatchedLoader, pending: dict[str, Any]
) -> tuple[Iterator[Any], Epoch] | None:
    """Return the interrupted epoch's iterator; None if its position is dropped.

    Raise ``IncompatibleState`` if the skipped samples are not those that were delivered.
    """
    after = watch.resume_rng or generators.host_states()
    devices, own_after = generators.device_states(), own_states(loader)
    number, base, age = epoch_number(loader), watch.base, watch.age
    epoch = resumed(pending, watch, loader)
    restore_epoch_start(loader, epoch.start)
    try:
        counts = by_samples(loader, pending)
        inner, why = (_by_samples if counts else _by_reading)(loader, watch, pending, epoch)
        # the script's own batch sampler may cut the same order in another way
        if why and not counts and _has_order(loader, pending):
            watch.base, watch.age, watch.instead = base, age, None
            restore_epoch_start(loader, epoch.start)
            inner, unfit = _by_samples(loader, watch, pending, epoch)
            why = why if unfit else ""
    except BaseException:  # such as an interrupt while data is read: the next attempt must find the same position
        watch.base, watch.age, watch.instead = base, age, None
        leave_rest(watch)
        watch.pending = pending
        raise
    finally:
        set_own_states(loader, own_after)
        generators.restore_devices(devices)
        generators.restore_host(after)
    if why:
        watch.base, watch.age, watch.instead = base, age, None
        leave_rest(watch)
        if watch.strict:
            watch.pending = pending  # a caller that catches the error must not get another epoch at its next attempt
            raise IncompatibleState(
                f"the position of {watch.name} in its data cannot be found again: {why}", where=watch.name, hint=WAYS
            )
        drop(loader, watch, pending, why)
        set_epoch_number(loader, number)
        return None
    watch.resume_rng = None
    watch.epoch, watch.epochs, watch.resumed_at = epoch, pending["epochs"], epoch.delivered
    return inner, epoch


def _has_order(loader: DataLoader[Any], pending: Mapping[str, Any]) -> bool:
    """Return whether the delivered samples can be skipped in an order of indices."""
    is_counted = isinstance(pending.get("samples"), int) and isinstance(pending.get("units"), Mapping)
    return is_counted and not is_stateful(loader) and not units_of(loader)["stream"]


def drop(loader: DataLoader[Any], watch: WatchedLoader, pending: Mapping[str, Any], why: str) -> None:
    """Drop a position, and report it: the loader's training epoch begins from its start."""
    watch.pending = None
    watch.epochs = max(0, pending["epochs"] - 1)
    emit(
        "loader.reset",
        f"loader {watch.name} begins its training epoch from the start, {pending['delivered']} batches of it are delivered again: {why}",
        loader=watch.name,
        batches=pending["delivered"],
    )


def _by_reading(
    loader: DataLoader[Any], watch: WatchedLoader, pending: Mapping[str, Any], epoch: Epoch
) -> tuple[Iterator[Any], str]:
    """Read the delivered batches again, and drop them. Return the iterator, and why it failed or an empty text."""
    delivered = pending["delivered"]
    stored, live = pending.get("units"), units_of(loader)
    other_size = isinstance(stored, Mapping) and live["stream"] and stored.get("batch_size") != live["batch_size"]
    if other_size and stored is not None:
        sizes = [stored["batch_size"]] * delivered
        if is_stateful(loader) or None in (stored["batch_size"], live["batch_size"]):
            return iter(()), _because(pending, live, "a stream's batches cannot be counted in another size")
        watch.instead = sized(sizes, _entries(loader))
        epoch.mixed = True
    if pending.get("mixed") and live["stream"]:
        return iter(()), "its batch size changed within this training epoch, and samples of a stream cannot be counted"
    inner = _iterator(loader, watch)
    if not delivered:
        return inner, ""
    if epoch.first is not None:
        generators.restore_host(epoch.first)
    if "reread" not in watch.reported:
        watch.reported.add("reread")
        emit(
            "loader.reread",
            f"loader {watch.name} cannot be moved to its position: the {delivered} batches delivered before are read again; "
            + (
                "its data set's state leaves out the samples in its shuffle buffer"
                if has_shuffle_buffer(core_of(loader).dataset)
                else "torchdata's StatefulDataLoader would not need to"
            ),
            loader=watch.name,
            batches=delivered,
        )
    checksum, position, drawn = pending.get("checksum"), Position(), None
    attempts, may_fail = attempts_of(pending), int(pending.get("failed", 0))
    for done in range(attempts):
        try:
            batch = next(inner)
        except StopIteration:
            return inner, _because(pending, live, f"it gives {done} batches where {attempts} had been delivered")
        except Exception:  # the loop has left as many batches out
            if not may_fail:
                raise
            may_fail -= 1
            position.add_failed(watch.queue.popleft() if watch.queue else None)
            continue
        if watch.queue is None and pending.get("samples") is not None:
            checksum = None  # this loader's indices cannot be seen
        drawn = generators.host_states() if drawn is None and live["stream"] else drawn
        if not isinstance(checksum, int):
            continue
        if watch.queue:
            position.add_indices(*watch.queue.popleft())
        else:
            position.add_batch(batch)
    if not isinstance(checksum, int) or position.crc == checksum:
        epoch.position = position if isinstance(checksum, int) else None
        return inner, ""
    if drawn is not None and is_drawn_by(drawn, generators.host_states()):
        if "unverified" not in watch.reported:
            watch.reported.add("unverified")
            emit(
                "loader.unverified",
                f"loader {watch.name} continues after {delivered} batches: read again they differ from those that were delivered, as its "
                "data draws from the process's generators, from which the training loop draws too; samples may be lost or repeated",
                loader=watch.name,
                batches=delivered,
            )
        epoch.position = position
        return inner, ""
    reason = (
        "the batches read again are not those that were delivered"
        if live["stream"]
        else "its samples come in another order"
    )
    return inner, _because(pending, live, reason)


def _by_samples(
    loader: DataLoader[Any], watch: WatchedLoader, pending: Mapping[str, Any], epoch: Epoch
) -> tuple[Iterator[Any], str]:
    """Skip the delivered samples in the order, and make batches of the rest.

    Return the iterator, and why it failed or an empty text.
    """
    core, stored, live = core_of(loader), pending["units"], units_of(loader)
    batches, count = core.batch_sampler, int(pending["samples"])
    if is_stateful(loader):
        remainder = _own_rest(core, watch.own_state, stored, pending)
        if isinstance(remainder, str):
            return iter(()), _because(pending, live, remainder)
        watch.standing = RemainingSamples(batches.__dict__, remainder)
        crc = 0
    else:
        rest = Skipped(_order(loader, pending, epoch), count)
        checksum, crc = pending.get("checksum"), rest.crc
        if rest.done < count:
            return iter(()), _because(pending, live, f"it has {rest.done} samples where {count} had been delivered")
        if isinstance(checksum, int) and checksum != crc:
            return iter(()), _because(pending, live, "its samples come in another order")
        if cuts_plainly(batches):
            watch.instead = rest.batches(int(batches.batch_size), bool(batches.drop_last))  # type: ignore[union-attr]
        else:
            watch.instead = rest.entries()
    generator = core.generator
    # otherwise the workers would draw what the workers of the epoch's first batches drew
    if core.num_workers and not has_persistent_workers(core):
        core.generator = torch.Generator().manual_seed((crc << 24) + count)
    try:
        inner = _iterator(loader, watch)
    finally:
        core.generator = generator
    epoch.mixed, epoch.position = True, Position(count, crc)
    size = live["batch_size"] or 1
    epoch.delivered = epoch.resumed = -(-count // size)
    changes = ", ".join(changed(stored, live)) or "as it did before"
    emit(
        "loader.continued",
        f"loader {watch.name} continues after {count} samples of its training epoch, each of the others is delivered once: {changes}",
        loader=watch.name,
        samples=count,
    )
    return inner, ""


def _order(loader: DataLoader[Any], pending: Mapping[str, Any], epoch: Epoch) -> Iterator[Any]:
    """Return the interrupted epoch's order from its start, with the random draws of the iterator that made it.

    Single samples if the batch sampler only cuts an order, otherwise the index sampler's entries. The generators must
    be at the epoch's start.
    """
    core = core_of(loader)
    batches, workers = core.batch_sampler, pending["units"]["workers"]
    lazy = cuts_plainly(batches)
    source: Any = batches if batches is not None else core.sampler
    if core is not loader and epoch.first is not None:  # a generator creates the iterator at its first batch
        generators.restore_host(epoch.first)
    order = iter(()) if lazy else iter(source)
    base, age = pending["workers"]
    if base is None or not age:  # otherwise the workers were alive, and no seed was drawn for them
        # as torch draws
        torch.empty((), dtype=torch.int64, device=torch.get_default_device()).random_(generator=core.generator)
        if workers and not lazy:
            order = iter(source)  # an iterator with workers creates it twice
    if not workers and epoch.first is not None and core is loader:
        generators.restore_host(epoch.first)
    return iter(source.sampler) if lazy else order


def _own_rest(
    core: DataLoader[Any], own_state: Any, stored: Mapping[str, Any], pending: Mapping[str, Any]
) -> Iterator[Any] | str:
    """Return the rest of a torchdata loader's order, or why there is none.

    It is computed from the state that the loader stored with another number of workers.
    """
    state, since = sampler_state(own_state)
    order: Any = iter(core.batch_sampler) if core.batch_sampler is not None else None
    if not isinstance(state, Mapping) or not hasattr(order, "load_state_dict") or not hasattr(order, "sampler_iter"):
        return "its sampler has no state that another number of workers can take"
    try:
        order.load_state_dict(state)
    except StopIteration:
        return f"it has fewer samples than the {pending['samples']} that had been delivered"
    for _ in range(since * (stored["batch_size"] or 1)):
        next(order.sampler_iter, None)
    return order.sampler_iter  # type: ignore[no-any-return]


def _iterator(loader: DataLoader[Any], watch: WatchedLoader) -> Iterator[Any]:
    if watch.base is not None:
        watch.age -= 1  # make_iterator counts it again
        if watch.age < 0:
            watch.base, watch.age = None, 0  # the first epoch draws its seed again
    watch.queue = None
    if is_stateful(loader):
        return watch.original.__iter__(loader)  # type: ignore[attr-defined,no-any-return]
    inner = make_iterator(loader, watch)
    if watch.queue is not None:
        watch.instead = None
    if watch.queue is None and core_of(loader) is not loader and watch.instead is not None:
        first = next(inner, END)  # a generator, which creates the iterator at its first batch
        watch.instead = None
        inner = chain(() if first is END else (first,), inner)
    return inner


def _entries(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return the index entries of a stream's loader, without recording them."""
    core = core_of(loader)
    return iter(core.batch_sampler if core.batch_sampler is not None else core.sampler)


def _because(pending: Mapping[str, Any], live: Mapping[str, Any], what: str) -> str:
    """Return ``what``, with the settings that changed."""
    stored = pending.get("units")
    changes = changed(stored, live) if isinstance(stored, Mapping) else []
    return f"{what} ({', '.join(changes) if changes else 'its settings are the same: its data or its seed changed'})"
