"""Hugging Face's Trainer: ``Checkpoints``, a callback that saves, and goes on through ``resume_from_checkpoint=``. Seen with 5.23."""

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
from relight.capture.rng import restore_devices, restore_host
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
    """Saves all that ``trainer.train`` needs to go on, without waiting.

    ``path`` and ``options`` are ``relight.Checkpointer``'s, ``path`` one store's. Metrics are what the Trainer logs and evaluates
    (``relight.best("eval_loss")``). A step is saved when the next one begins: logged, evaluated, and with the generators as the next
    forward finds them. Saved: model, optimizer, scheduler, scaler, the Trainer's state and its callbacks', generators. Where the data is,
    the Trainer finds by itself, as it does from its own checkpoints: it takes its sampler's order and skips.

    ``resume`` False: nothing is taken from the run. Training begins where the Trainer begins it, and what it saves comes behind what is
    there, which stays; who resumes later goes on from that.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = True, **options: Any) -> None:
        checkpointer_options(options, {})
        self._path, self._resume, self._options = path, resume, options
        self._trainer: Trainer | None = None
        self._ckpt: Checkpointer | None = None
        self._chosen: str | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._rng: RngSnapshot | None = None
        self._told, self._metrics = 0, dict[str, Any]()

    def resume(self, trainer: Trainer, which: str | int = "latest") -> str | None:
        """What ``trainer.train(resume_from_checkpoint=…)`` is to be given: None on a fresh run, which is what it then takes to begin anew.

        It is a folder with the Trainer's counters. The weights are not in it: they go from the run straight into the live model when
        training begins. ``latest`` is the newest that verifies; all ranks go on from what rank 0 has chosen. None with ``resume=False``.
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

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """All is set up: put back what ``resume`` has chosen."""
        if self._trainer is None:
            raise ConfigError(
                "Checkpoints does not know its Trainer", hint="trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))"
            )
        given = {"fresh": not self._resume, **self._options}
        self._ckpt = Checkpointer(self._path, **checkpointer_options(given, self._components(self._trainer)))
        self._told = state.global_step
        if not self._resume:
            return
        begun = self._ckpt.restore(self._chosen or "latest")
        if state.global_step != begun:
            raise IncompatibleState(
                f"training is at step {state.global_step}, the run at {begun}",
                hint="trainer.train(resume_from_checkpoint=checkpoints.resume(trainer)), and nothing else",
            )
        if begun:
            self._rng = frozen_generators()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The step before is all over: save it if it is time to. The first one finds the generators as they were here."""
        if self._rng is not None:
            states, self._rng = self._rng.states(), None
            restore_host(states)
            restore_devices({kind: one for kind, one in states.items() if kind in ("cuda", "xpu", "mps")})
        self._step(state)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """What is logged of this step; evaluations are logged, too."""
        self._metrics.update(numbers(logs or {}))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the last step if it is not yet, and give everything back."""
        if self._ckpt is not None:
            self._step(state)
            self._ckpt.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _step(self, state: TrainerState) -> None:
        if self._ckpt is not None and state.global_step != self._told:
            metrics, self._metrics, self._told = self._metrics, {}, state.global_step
            self._ckpt.step(state.global_step - 1, **metrics)

    def _components(self, trainer: Trainer) -> dict[str, object]:
        inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate's stands around it
        if not isinstance(inner, torch.optim.Optimizer):
            raise ConfigError(f"the optimizer is a {type(inner).__name__}", hint="DeepSpeed keeps its own: let the Trainer save")
        found: dict[str, object] = {"model": trainer.model_wrapped, "optimizer": inner, "scheduler": trainer.lr_scheduler}
        if trainer.accelerator.scaler is not None:
            found["scaler"] = trainer.accelerator.scaler
        return {**found, "trainer": StateFunctions(lambda: {"state": _text_of(trainer)}, lambda state: None)}

    def _choose(self, which: str | int) -> str | None:
        """The id; None on a run without a checkpoint."""
        try:
            store = Store(self._path, **self._keys())
            found = store.checkpoints() if which == "latest" else [one for one, _ in store.verify(which)]
        except CheckpointNotFound:
            if which != "latest":
                raise
            return None
        for one in reversed(found):
            if all(not findings for _, findings in store.verify(one.id)):
                return one.id
            emit("restore.skipped", f"checkpoint {one.id} is passed over: it does not verify", id=one.id, kind="corrupt")
        if found:
            raise CorruptCheckpoint(f"none of the {len(found)} checkpoints can be read", where=os.fspath(self._path))
        return None

    def _keys(self) -> dict[str, Any]:
        return {"encrypt": self._options["encrypt"]} if "encrypt" in self._options else {}


def _text_of(trainer: Trainer) -> str:
    """The Trainer's state as its own checkpoints have it, its callbacks' in it."""
    told: dict[str, list[Any]] = {}
    for one in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(one, ExportableState):
            told.setdefault(type(one).__name__, []).append(one.state())
    callbacks = {name: states if len(states) > 1 else states[0] for name, states in told.items()}
    return json.dumps({**dataclasses.asdict(trainer.state), "stateful_callbacks": callbacks})
