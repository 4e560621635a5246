"""Stores of other distributions, found by their entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.log.test_log_stale_listings import save

from relight.commit import Attempt
from relight.errors import ConfigError, RelightError
from relight.store import open_bytes
from relight.store.cached import CachedStore
from relight.store.wrapper import unwrap

MODULE = '''
"""A store of directories by the scheme shelf://."""

from dataclasses import replace

from relight.errors import ConfigError
from relight.store import LocalStore

SETTINGS = []


class ShelfStore(LocalStore):
    """A directory that counts as remote."""

    def __init__(self, url):
        super().__init__(url.removeprefix("shelf://"))
        self.url = url

    def properties(self):
        return replace(super().properties(), remote=True)


def open_store(url, **settings):
    SETTINGS.append(settings)
    return ShelfStore(url)


def refuse(url, **settings):
    raise ConfigError("the shelf is full")


def fail(url, **settings):
    raise KeyError("no shelf")


def no_store(url, **settings):
    return 5


def another_url(url, **settings):
    return LocalStore(url.removeprefix("shelf://"))
'''
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a distribution with an entry point, in a directory of the path."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "shelf_store.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "shelf_store", raising=False)

    def put(value: str = "shelf_store:open_store", name: str = "relight-shelf") -> Path:
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[relight.stores]\nshelf = {value}\n")
        return site

    return put


def test_a_distribution_opens_its_scheme(tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are saved and listed there, in other processes too. The module is imported at the first use of its scheme."""
    monkeypatch.setenv("RELIGHT_STORE_PATIENCE_S", "7")
    site, url = install(), f"shelf://{tmp_path}/store"
    open_bytes(tmp_path)
    assert "shelf_store" not in sys.modules
    store = open_bytes(url)
    assert sys.modules["shelf_store"].SETTINGS == [{"deadline_s": 7.0}]
    save(Attempt.begin(store, "demo"), 3)
    path = os.pathsep.join([str(site), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "relight", "ls", f"{url}/demo"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert " 3 " in done.stdout


def test_a_remote_store_of_a_distribution_is_cached(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``RELIGHT_CACHE`` applies to every store that declares itself remote."""
    install()
    monkeypatch.setenv("RELIGHT_CACHE", str(tmp_path / "cache"))
    store = open_bytes(f"shelf://{tmp_path}/store")
    assert isinstance(store, CachedStore) and type(unwrap(store)).__name__ == "ShelfStore"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("shelf_store:missing", "importing the store of shelf:// failed: AttributeError"),
        ("missing_module:open", "importing the store of shelf:// failed: ModuleNotFoundError"),
        ("shelf_store:fail", "failed: KeyError('no shelf')"),
        ("shelf_store:no_store", "failed: the result is of type int, not a ByteStore"),
        ("shelf_store:another_url", "failed: the store's url is"),
    ],
)
def test_an_error_names_the_distribution(tmp_path: Path, install: Install, value: str, what: str) -> None:
    """A distribution that cannot be imported, fails, or returns something else is named, with what to do."""
    install(value)
    with pytest.raises(ConfigError) as caught:
        open_bytes(f"shelf://{tmp_path}/store")
    assert what in caught.value.what
    assert caught.value.where == f"relight-shelf ({value})"
    assert "update or uninstall" in caught.value.hint


def test_an_error_of_relight_passes(tmp_path: Path, install: Install) -> None:
    """The store's own errors of Relight's kinds are not changed."""
    install("shelf_store:refuse")
    with pytest.raises(RelightError, match="the shelf is full"):
        open_bytes(f"shelf://{tmp_path}/store")


def test_two_distributions_of_one_scheme_are_refused(tmp_path: Path, install: Install) -> None:
    """Which one was meant is unknown, so both are named and none is imported."""
    install()
    install("shelf_store:no_store", "other-shelf")
    with pytest.raises(ConfigError, match="several distributions open shelf://") as caught:
        open_bytes(f"shelf://{tmp_path}/store")
    assert "relight-shelf (shelf_store:open_store)" in caught.value.where and "other-shelf" in caught.value.where
    assert "shelf_store" not in sys.modules


def test_an_unknown_scheme_lists_the_plugins(install: Install) -> None:
    """A misspelt scheme is refused, with all that exist."""
    install()
    with pytest.raises(ConfigError, match="no store for shelv://") as caught:
        open_bytes("shelv://x")
    assert caught.value.hint.endswith("https://; installed plug-ins: shelf://; or install a package that registers it")
