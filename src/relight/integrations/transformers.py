"""Hugging Face's Trainer: ``TrainerCheckpoints``, a callback that saves, and resumes by ``resume_from_checkpoint=``.

Tested with 5.23.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from relight.api import Store, load
from relight.capture import RngSnapshot, frozen_generators
from relight.capture.rng import of_devices, restore_devices, restore_host
from relight.checkpointer import Checkpointer
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, IncompatibleState
from relight.integrations.frameworks import StateFunctions, checkpointer_options, needed, numbers
from relight.observe import emit

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
else:
    TrainerCallback = needed("transformers", "transformers accelerate").TrainerCallback
    ExportableState = needed("transformers.trainer_callback", "transformers accelerate").ExportableState

_NO_WEIGHTS = b'{"__metadata__":{"format":"pt"}}'


class TrainerCheckpoints(TrainerCallback):
    """Saves everything that ``trainer.train`` needs to resume, without waiting.

    ``path`` and ``options`` are ``relight.Checkpointer``'s, with one store in ``path``. Metrics are those that the
    Trainer logs and evaluates (``relight.best("eval_loss")``). A step is saved when the next one begins: after logging
    and evaluation, and with the generators as the next forward uses them. Saved: model, optimizer, scheduler, scaler,
    the Trainer's state and its callbacks', generators. The Trainer finds the data's position itself, as with its own
    checkpoints: it takes its sampler's order and skips.

    ``resume`` False: nothing is restored from the run. Training begins where the Trainer begins it, and its saves
    follow the existing checkpoints, which stay. A later resume continues from the new saves.

    Args:
        path: The store and the run: one store.
        resume: Whether ``trainer.train`` continues from the run's newest checkpoint.
        **options: Options of ``relight.Checkpointer``.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = True, **options: Any) -> None:
        checkpointer_options(options, {})
        self._path, self._resume, self._options = path, resume, options
        self._trainer: Trainer | None = None
        self._ckpt: Checkpointer | None = None
        self._chosen: str | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._rng: RngSnapshot | None = None
        self._reported_step, self._metrics = 0, dict[str, Any]()

    def resume(self, trainer: Trainer, which: str | int = "latest") -> str | None:
        """Return the argument for ``trainer.train(resume_from_checkpoint=…)``: a folder with the Trainer's counters.

        None, for a fresh run or with ``resume=False``, makes the Trainer begin from scratch. The weights are not in the
        folder: they are read from the run straight into the live model when training begins. ``latest`` is the newest
        checkpoint that verifies; all ranks resume from rank 0's choice.

        Args:
            trainer: The Trainer that will train.
            which: The checkpoint, as for ``relight.load``.
        """
        self._trainer = trainer
        if not self._resume:
            return None
        box = [self._choose(which) if trainer.args.process_index == 0 else None]
        if trainer.args.world_size > 1:
            torch.distributed.broadcast_object_list(box, src=0)
        self._chosen = box[0]
        if self._chosen is None:
            return None
        state = load(self._path, self._chosen, only=["trainer/*"], **self._keys())["trainer"]
        self._folder = tempfile.TemporaryDirectory(prefix="relight-")
        folder = Path(self._folder.name)
        (folder / "trainer_state.json").write_text(state["state"], encoding="utf-8")
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(_NO_WEIGHTS)) + _NO_WEIGHTS)
        return str(folder)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the checkpoint that ``resume`` has chosen; everything is set up now."""
        if self._trainer is None:
            raise ConfigError(
                "TrainerCheckpoints has not been given its Trainer",
                hint="trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))",
            )
        options = {"fresh": not self._resume, "first_step": 1, **self._options}
        self._ckpt = Checkpointer(self._path, **checkpointer_options(options, self._components(self._trainer)))
        self._reported_step = state.global_step
        if not self._resume:
            return
        begun = self._ckpt.restore(self._chosen or "latest") - 1
        if state.global_step != begun:
            raise IncompatibleState(
                f"training is at step {state.global_step}, the run at {begun}",
                hint="trainer.train(resume_from_checkpoint=checkpoints.resume(trainer)), and nothing else",
            )
        if begun:
            self._rng = frozen_generators()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the previous step, which is complete, if it is due. Before the first step, restore the generators again."""
        if self._rng is not None:
            states, self._rng = self._rng.states(), None
            restore_host(states)
            restore_devices(of_devices(states))
        self._step(state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the metrics of this step; evaluations are logged, too."""
        self._metrics.update(numbers(logs or {}))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the last step if it is not saved yet, and close the Checkpointer."""
        if self._ckpt is not None:
            self._step(state)
            self._ckpt.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _step(self, state: TrainerState) -> None:
        if self._ckpt is not None and state.global_step != self._reported_step:
            metrics, self._metrics, self._reported_step = self._metrics, {}, state.global_step
            self._ckpt.step(state.global_step, **metrics)

    def _components(self, trainer: Trainer) -> dict[str, object]:
        inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # inside accelerate's wrapper
        if not isinstance(inner, torch.optim.Optimizer):
            raise ConfigError(
                f"TrainerCheckpoints cannot save a {type(inner).__name__}, DeepSpeed's own optimizer",
                hint="let the Trainer save, with relight.integrations.deepspeed_engine: docs/plugins/transformers.md",
            )
        components: dict[str, object] = {
            "model": trainer.model_wrapped,
            "optimizer": inner,
            "scheduler": trainer.lr_scheduler,
        }
        if trainer.accelerator.scaler is not None:
            components["scaler"] = trainer.accelerator.scaler
        return {**components, "trainer": StateFunctions(lambda: {"state": _text_of(trainer)}, lambda state: None)}

    def _choose(self, which: str | int) -> str | None:
        """Return the checkpoint's id; None for a run without a checkpoint."""
        try:
            store = Store(self._path, **self._keys())
            candidates = (
                store.checkpoints() if which == "latest" else [checkpoint for checkpoint, _ in store.verify(which)]
            )
        except CheckpointNotFound:
            if which != "latest":
                raise
            return None
        for checkpoint in reversed(candidates):
            if all(not findings for _, findings in store.verify(checkpoint.id)):
                return checkpoint.id
            emit(
                "restore.skipped",
                f"checkpoint {checkpoint.id} is skipped: it does not verify",
                id=checkpoint.id,
                kind="corrupt",
            )
        if candidates:
            raise CorruptCheckpoint(
                f"none of the {len(candidates)} checkpoints can be read", where=os.fspath(self._path)
            )
        return None

    def _keys(self) -> dict[str, Any]:
        return {"encrypt": self._options["encrypt"]} if "encrypt" in self._options else {}


def _text_of(trainer: Trainer) -> str:
    """Return the Trainer's state, with its callbacks', in the form of its own checkpoints."""
    exported: dict[str, list[Any]] = {}
    for source in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(source, ExportableState):
            exported.setdefault(type(source).__name__, []).append(source.state())
    callbacks = {name: states if len(states) > 1 else states[0] for name, states in exported.items()}
    return json.dumps({**dataclasses.asdict(trainer.state), "stateful_callbacks": callbacks})
