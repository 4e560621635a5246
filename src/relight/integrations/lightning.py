"""Lightning: ``LightningCheckpoints`` replaces ``ModelCheckpoint``; ``RelightCheckpointIO`` works with it.

Uses ``lightning`` or ``pytorch_lightning``: the one that the program has imported, otherwise the one that is
installed. Tested with 2.6.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from relight.capture import leave_epoch
from relight.checkpointer import Checkpointer
from relight.errors import ConfigError
from relight.integrations.frameworks import (
    StateFunctions,
    checkpointer_options,
    loaders_in,
    needed,
    numbers,
    read_as_file,
    remove_as_file,
    save_options,
    write_as_file,
)

_HERE = (
    "pytorch_lightning"
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    else "lightning.pytorch"
)
if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.plugins.io import CheckpointIO
else:
    Checkpoint = needed(f"{_HERE}.callbacks", "lightning").Checkpoint
    CheckpointIO = needed(f"{_HERE}.plugins.io", "lightning").CheckpointIO

_LOADERS = "combined_loader"


class LightningCheckpoints(Checkpoint):
    """A callback that saves everything that ``trainer.fit`` needs to resume, without waiting. It resumes automatically.

    ``path`` and ``options`` are ``relight.Checkpointer``'s: ``save=relight.every(steps=…) | relight.best("val_loss")``,
    ``keep=relight.keep(…)``. Metrics are those passed to ``self.log``. A step is an optimizer step:
    ``trainer.global_step`` of them are done. Saved: module, optimizers, schedulers, loops, callbacks, precision, data
    module, generators, and each loader's position.

    Raise ``ConfigError`` with ``trainer.fit(ckpt_path=…)``, which would restore another state over this one. Raise it
    also with strategies that have their own optimizers (DeepSpeed): use ``RelightCheckpointIO`` or the strategy's own
    saving.

    ``resume`` False: nothing is restored from the run. Training begins with the given state, and its saves follow the
    existing checkpoints, which stay. A later resume continues from the new saves.

    Args:
        path: The store and the run.
        resume: Whether ``trainer.fit`` continues from the run's newest checkpoint.
        **options: Options of ``relight.Checkpointer``.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = True, **options: Any) -> None:
        super().__init__()
        checkpointer_options(options, {})
        self._path, self._resume, self._options = path, resume, options
        self._ckpt: Checkpointer | None = None
        self._reported_step = self._waits = 0
        self._metrics: dict[str, Any] = {}
        self._loaders: dict[str, object] = {}
        self.best_model_path = ""
        """Required by the trainer of every checkpoint callback: empty, as there is no file."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the state if the run has one: everything is set up now. Do nothing with ``fast_dev_run``."""
        if trainer.fast_dev_run:
            return
        if trainer.ckpt_path is not None:
            raise ConfigError(
                "fit(ckpt_path=…) and Checkpoints would both restore",
                hint="leave ckpt_path out, or keep ModelCheckpoint",
            )
        foreign = [type(item).__name__ for item in trainer.optimizers if not isinstance(item, torch.optim.Optimizer)]
        if foreign:
            raise ConfigError(f"the strategy has an optimizer of its own, {foreign[0]}", hint="keep ModelCheckpoint")
        trainer.fit_loop.setup_data()
        schedulers = {f"scheduler_{i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)}
        optimizers = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(trainer.optimizers)}
        order_state = StateFunctions(
            lambda: _ask(trainer, pl_module), lambda state: _restore_order(trainer, pl_module, state)
        )
        state: dict[str, object] = {"model": trainer.model, **optimizers, **schedulers, "trainer": order_state}
        self._loaders = loaders_in(trainer.train_dataloader)
        options = {"fresh": not self._resume, **self._options}
        self._ckpt = Checkpointer(
            self._path, **checkpointer_options({"first_step": 1, **options}, {**state, **self._loaders})
        )
        if self._resume:
            self._ckpt.restore()
        self._reported_step = trainer.global_step
        iter(trainer.fit_loop._data_fetcher)  # type: ignore[call-overload] # the iterator that setup_data created was not watched

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record a completed step, and save if it is due; after validation if validation follows."""
        trainer.fit_loop.restarting = False  # otherwise Lightning would skip plateau schedulers at this epoch's end
        if trainer.global_step == self._reported_step:
            return  # gradients are still being accumulated
        self._reported_step = self._waits = trainer.global_step
        self._metrics = numbers(trainer.callback_metrics)
        if not (trainer.is_last_batch or _validates(trainer, batch_idx)):
            self._step()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if it is due, as the validated state may be the best.

        Not after the epoch's last batch: Lightning has not finished the epoch.
        """
        if not trainer.sanity_checking:
            self._metrics = numbers(trainer.callback_metrics)
            if not trainer.is_last_batch:
                self._step()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the epoch's metrics."""
        self._metrics = numbers(trainer.callback_metrics)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the previous epoch's end.

        At this time it has the changes that Lightning makes after all hooks of that end (schedulers, counters).
        """
        for loader in self._loaders.values():
            if self._waits and isinstance(loader, torch.utils.data.DataLoader):
                leave_epoch(loader)  # Lightning counts batches, and does not request one after the last
        self._step()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step if it is not saved yet, and close the Checkpointer."""
        self._step()
        if self._ckpt is not None:
            self._ckpt.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the end of the last step if the state has not changed since."""
        if self._ckpt is not None:
            trace: TracebackType | None = exception.__traceback__
            self._ckpt.__exit__(type(exception), exception, trace)

    def _step(self) -> None:
        if self._ckpt is not None and self._waits:
            step, self._waits = self._waits, 0
            self._ckpt.step(step, **self._metrics)


def _validates(trainer: Trainer, batch_idx: int) -> bool:
    """Return whether validation may follow this batch, which is not the epoch's last."""
    every = trainer.val_check_batch
    done = (
        batch_idx + 1
        if trainer.check_val_every_n_epoch is not None
        else trainer.fit_loop.epoch_loop.total_batch_idx + 1
    )
    return bool(trainer.enable_validation and isinstance(every, int) and done % every == 0)


def _ask(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """Return the state other than weights, optimizers, schedulers and data."""
    loops = trainer.fit_loop.state_dict()
    loops["state_dict"].pop(_LOADERS, None)  # Relight has the loaders
    extra: dict[str, Any] = {"state_dict": {}}
    pl_module.on_save_checkpoint(extra)
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, pl_module, extra)
    extra.pop("state_dict")
    data = getattr(trainer, "datamodule", None)
    return {
        "loops": loops,
        "callbacks": {
            callback.state_key: callback.state_dict()
            for callback in trainer.callbacks
            if not isinstance(callback, LightningCheckpoints)
        },
        "precision": trainer.precision_plugin.state_dict(),
        "datamodule": data.state_dict() if data is not None else {},
        "extra": extra,
    }


def _restore_order(trainer: Trainer, pl_module: LightningModule, state: dict[str, Any]) -> None:
    """Restore that state, in Lightning's order."""
    data = getattr(trainer, "datamodule", None)
    if data is not None and state["datamodule"]:
        data.load_state_dict(state["datamodule"])
    extra = {"state_dict": {}, **state["extra"]}
    pl_module.on_load_checkpoint(extra)
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, pl_module, extra)
        if callback.state_key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][callback.state_key])
    trainer.precision_plugin.load_state_dict(state["precision"])
    loops = trainer.fit_loop
    loops.load_state_dict(state["loops"])
    # between two epochs: the next one begins normally
    if loops.epoch_progress.total.started < loops.epoch_progress.total.ready:
        loops.epoch_loop.restarting = False
        loops.epoch_loop.val_loop.restarting = True  # no sanity check


class RelightCheckpointIO(CheckpointIO):
    """Writes each file of ``ModelCheckpoint`` as a run in Relight's format: ``Trainer(plugins=[RelightCheckpointIO()])``.

    The run is a directory. Its checkpoint exists as a whole or not at all, every byte is verified, and nothing is
    executed on load; ``ckpt_path=`` takes it. Saving waits, as with ``ModelCheckpoint``.  Values other than tensors,
    arrays and plain values (hyperparameters of your own classes) are refused by name.

    Args:
        **options: Options of ``relight.save``: ``encrypt=``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = save_options(options)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save. Durable when it returns; until then ``path`` has its previous content."""
        write_as_file(path, checkpoint, int(checkpoint.get("global_step", 0)), self._options)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return what was saved, on the CPU, verified."""
        content: dict[str, Any] = read_as_file(path, self._options)
        return content

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint of this class; raise ``CheckpointNotFound`` for anything else."""
        remove_as_file(path)
