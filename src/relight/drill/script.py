"""Run a drilled script under ``relight run``: ``python -m relight.drill.script ORDERS STORE [-m] SCRIPT [ARGS…]``.

The script runs unchanged, with two exceptions. A ``Checkpointer`` that would write outside the drill's store is refused. After each step,
the process executes the drill's order, if there is one.
"""

from __future__ import annotations

import math
import os
import runpy
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relight.checkpointer import Checkpointer, observers
from relight.comm.children import enter_script
from relight.drill.orders import DrillOrders
from relight.errors import ConfigError
from relight.store.urls import absolute


class Obedient:
    """Observer that executes the drill's orders. It runs before the observers that read the loss."""

    def __init__(self, orders: DrillOrders, store: Path) -> None:
        self._orders, self._store = orders, store

    def place(self, url: str, run: str) -> tuple[str, str]:
        """Return store and run unchanged, if the store is the drill's."""
        self._check(url)
        return url, run

    def on_start(self, ckpt: Checkpointer) -> None:
        """Check all tiers before anything is written: each must be in the drill's store."""
        for place in ckpt.store_urls:
            self._check(place)

    def on_restore(self, ckpt: Checkpointer, step: int, checkpoint_id: str | None) -> None:
        """Do nothing: no order is for this event."""

    def on_step(self, ckpt: Checkpointer, step: int, metrics: Mapping[str, Any], samples: Any) -> None:
        """Execute the order if its step has come."""
        order = self._orders.read()
        if order is None:
            return
        if order.what == "poison":
            if step == order.step and "loss" in metrics and isinstance(metrics, dict):
                self._orders.do()
                metrics["loss"] = math.nan
        elif step >= order.step and order.rank == int(os.environ.get("RANK", "0")) and self._orders.do():
            if order.what == "crash":
                os.abort()
            threading.Event().wait()

    def on_end(self, ckpt: Checkpointer) -> None:
        """Do nothing: no order is for this event."""

    def _check(self, url: str) -> None:
        path = Path(absolute(url).removeprefix("file://"))
        if not path.resolve().is_relative_to(self._store.resolve()):
            what = "a drill's script may only write to the drill's own store"
            raise ConfigError(what, where=url, hint="pass {store} to the script as its store")


def main() -> None:
    """Install the observer, and run the script."""
    orders, store, arguments = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    observers.insert(0, Obedient(DrillOrders(orders), store))
    as_module = arguments[0] == "-m"
    arguments = arguments[as_module:]
    sys.argv = arguments
    enter_script(arguments[0], as_module=as_module)
    if as_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
