"""torchtitan: ``CheckpointManager``, which replaces torchtitan's own. Tested with 0.3.

Set ``config.checkpoint = CheckpointManager.Config(enable=True, interval=500)`` where the job's configuration is built.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relight.checkpointer import Checkpointer, Save
from relight.errors import ConfigError
from relight.integrations.frameworks import needed
from relight.policy import keep
from relight.save_reason import ASKED

if TYPE_CHECKING:
    from torchtitan.components.checkpointer import BaseCheckpointManager
else:
    BaseCheckpointManager = needed("torchtitan.components.checkpointer", "torchtitan").BaseCheckpointManager


class CheckpointManager(BaseCheckpointManager):
    """Saves model parts, optimizers, schedulers, data and train state in the run ``folder/run``, without waiting.

    Of torchtitan's settings it uses ``enable``, ``folder``, ``interval``, ``keep_latest_k``, ``load_step``,
    ``load_only`` and ``enable_first_step_checkpoint``. The last save is a full checkpoint, too. Raise ``ConfigError``
    for settings that require another format (``initial_load_path``, ``last_save_in_hf``): use ``relight.load`` and the
    exporters instead.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's own settings."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable, self.save_future = config.enable, None
        if not self.enable:
            return
        for name in ("initial_load_path", "last_save_in_hf", "exclude_from_loading", "create_seed_checkpoint"):
            if getattr(config, name):
                raise ConfigError(
                    f"checkpoint.{name} applies to torchtitan's own checkpoint format",
                    hint="leave it out, or use torchtitan's manager",
                )
        self._config, self._last = config, Save(0, ASKED)
        parts = {f"model_{i}": part for i, part in enumerate(model_parts)}
        optims = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
        rest = {"schedulers": lr_schedulers, "dataloader": dataloader, **states}
        self._ckpt = Checkpointer(
            os.path.join("" if "://" in config.folder else base_folder, config.folder, "run"),
            state={**parts, **optims, **{name: value for name, value in rest.items() if value is not None}},
            first_step=1,
            save=None,  # torchtitan calls save() at its own interval
            keep=keep(last=config.keep_latest_k) if config.keep_latest_k else None,
            per_rank=["dataloader"] if dataloader is not None else [],
        )

    def _load(self, step: int = -1) -> bool:
        return self._ckpt.restore("latest" if step == -1 else step) > 1

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        first = curr_step == 1 and self._config.enable_first_step_checkpoint
        if self._config.load_only or not (last_step or first or curr_step % self._config.interval == 0):
            return False
        self._last = self._ckpt.save(curr_step, block=last_step)
        return True

    def _maybe_wait_for_staging(self) -> None:
        self._ckpt.barrier()

    def _wait_for_saving(self) -> None:
        self._ckpt.barrier()

    def _close(self) -> None:
        self._ckpt.close(save=False)
