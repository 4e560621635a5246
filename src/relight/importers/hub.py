"""Repositories of the Hugging Face Hub: their addresses, and downloads to the cache of ``huggingface_hub``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from relight.errors import CheckpointNotFound, ConfigError, StoreUnavailable, extra_hint
from relight.importers.files import LINK, Files, Stamp

SCHEME = "hf://"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.json", "*.md")
"""Files of a repository that are downloaded."""


class HubAddress(NamedTuple):
    """A model repository, and a branch, tag or commit; None for the default branch."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo}" + (f"@{self.revision}" if self.revision else "")


def is_hub(path: str) -> bool:
    """Return whether the path is an address of the Hub: ``hf://ORG/NAME``."""
    return path.lower().startswith(SCHEME)


def hub_address(path: str) -> HubAddress:
    """Return the parts of ``hf://ORG/NAME[@REVISION]``. Raise ``ConfigError`` if it has another form."""
    repo, _, revision = path[len(SCHEME) :].rstrip("/").partition("@")
    names = repo.split("/")
    if len(names) != 2 or not all(names):
        raise ConfigError(
            "this names no repository of the Hub", where=path, hint="hf://ORG/NAME, or hf://ORG/NAME@REVISION"
        )
    return HubAddress(repo, revision or None)


def hub_library() -> Any:
    """Return the module ``huggingface_hub``. Raise ``ConfigError`` if it is not installed."""
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigError("hf:// needs huggingface_hub", hint=extra_hint("hub")) from error


@contextmanager
def hub_errors(address: HubAddress) -> Iterator[None]:
    """Convert the library's errors within the block."""
    errors = importlib.import_module("huggingface_hub.errors")
    failed = next(cls for cls in errors.HfHubHTTPError.__mro__ if cls.__name__ in ("HTTPError", "RequestException"))
    try:
        yield
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise CheckpointNotFound(
            "the Hub has no such repository or revision, or the token may not see it",
            where=str(address),
            hint="check the name; hf auth login, or HF_TOKEN",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointNotFound(
            "it is not in the local cache, and the Hub cannot be reached",
            where=str(address),
            hint="download it with a network: hf download; HF_HUB_OFFLINE=0",
        ) from error
    except (failed, OSError) as error:
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
        refused = status in (401, 403)
        raise StoreUnavailable(
            f"the Hub refused the request ({status})"
            if refused
            else f"a request to the Hub failed: {str(error).splitlines()[0][:300]}",
            where=str(address),
            hint="a token that may write: hf auth login, or HF_TOKEN" if refused else "repeat the command",
            retryable=not refused,
        ) from error


class HubFiles(Files):
    """The files of a repository in the cache: a snapshot's links to files in the repository's ``blobs``, which are followed."""

    def __init__(self, path: str) -> None:
        self._links: dict[str, str] = {}
        self._blobs = os.path.join(os.path.realpath(os.path.join(path, os.pardir, os.pardir)), "blobs", "")
        super().__init__(path)

    def where(self, name: str) -> str:
        """Return the file's path."""
        return self._links.get(name) or super().where(name)

    def _scan(self, folder: str, level: int) -> None:
        super()._scan(folder, level)
        for name in [name for name, kind in self.others.items() if kind == LINK]:
            target = os.path.realpath(super().where(name))
            if target.startswith(self._blobs) and os.path.isfile(target):
                status = os.stat(target)
                self.stamps[name] = Stamp(status.st_size, status.st_mtime_ns, status.st_ino)
                self._links[name] = target
                del self.others[name]


def from_hub(path: str) -> HubFiles:
    """Return a repository's files. Download what the cache lacks; without a network, the cache counts."""
    address, hub = hub_address(path), hub_library()
    with hub_errors(address):
        folder = hub.snapshot_download(address.repo, revision=address.revision, allow_patterns=list(WEIGHTS))
    return HubFiles(str(folder))
