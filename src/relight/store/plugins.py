"""Stores of other distributions: entry points of the group ``relight.stores``.

An entry point's name is the scheme of its URLs. Its value is a callable ``open(url, **settings)`` that returns a ``ByteStore``. It is
imported when a URL of the scheme is opened first. Settings: ``deadline_s``, the seconds after which an operation must end.
"""

from __future__ import annotations

from relight.errors import ConfigError, RelightError
from relight.store.base import ByteStore
from relight.store.object_client import RetryTimes

GROUP = "relight.stores"


def open_plugin(scheme: str, url: str) -> ByteStore | None:
    """Return the store at ``url`` from the distribution that has the scheme; None if no distribution has it."""
    from importlib.metadata import entry_points  # it takes some time to import

    entries = {entry.value: entry for entry in entry_points(group=GROUP, name=scheme)}
    if not entries:
        return None
    owners = [f"{entry.dist.name if entry.dist else 'a distribution'} ({value})" for value, entry in entries.items()]
    if len(entries) > 1:
        raise ConfigError(
            f"several distributions open {scheme}://", where=", ".join(owners), hint="uninstall all but one"
        )
    (entry,), (owner,) = entries.values(), owners
    hint = f"update or uninstall the distribution; its entry point is {scheme} in the group {GROUP}"
    try:
        opener = entry.load()
    except Exception as error:
        raise ConfigError(f"importing the store of {scheme}:// failed: {error!r}", where=owner, hint=hint) from error
    try:
        store = opener(url, deadline_s=RetryTimes.usual().deadline_s)
    except RelightError:
        raise
    except Exception as error:
        raise ConfigError(f"opening {url} failed: {error!r}", where=owner, hint=hint) from error
    if not isinstance(store, ByteStore):
        raise ConfigError(
            f"opening {url} failed: the result is of type {type(store).__name__}, not a ByteStore",
            where=owner,
            hint=hint,
        )
    if not store.url.startswith(f"{scheme}://"):  # other processes open the store by this URL
        raise ConfigError(f"opening {url} failed: the store's url is {store.url!r}", where=owner, hint=hint)
    return store


def plugin_schemes() -> list[str]:
    """Return the schemes of installed plug-ins, sorted."""
    from importlib.metadata import entry_points

    return sorted(entry_points(group=GROUP).names)
