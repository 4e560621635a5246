"""Lightning: killed and resumed, with callback and CheckpointIO, in one process and two."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest
from killing import killed_and_resumed

import relight
from relight.errors import CheckpointNotFound, ConfigError

pytest.importorskip("lightning", reason="lightning is not installed: make plugins")
warnings.simplefilter("ignore")
for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)
import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from relight.integrations.lightning import LightningCheckpoints, RelightCheckpointIO  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # the framework's own warnings, and torch's warnings about it


class Gone(BaseException):
    """The process is killed: no save and no cleanup follow."""


class Model(pl.LightningModule):
    """A model with dropout, a plateau schedule, a validation loss and its own state."""

    def __init__(self, plateau: bool = False) -> None:
        super().__init__()
        self.net, self.plateau, self.seen = (
            nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 1)),
            plateau,
            0,
        )

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.seen += len(batch[0])
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self.plateau:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["seen"]


class Trace(pl.Callback):
    """Record the steps and validations, and end the process at one step."""

    def __init__(self, end_at: int | None = None) -> None:
        self.end_at, self.steps, self.validated = end_at, {}, {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        position = trainer.global_step, batch_idx
        self.steps[position] = (
            trainer.current_epoch,
            outputs["loss"].item(),
            trainer.optimizers[0].param_groups[0]["lr"],
            pl_module.seen,
        )

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.validated[trainer.global_step] = trainer.callback_metrics["val_loss"].item()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.end_at is not None and trainer.global_step >= self.end_at:
            raise Gone


def fit(path, *, end_at=None, plateau=False, save=None, loader=DataLoader, model=None, resume=True, **options) -> Trace:
    pl.seed_everything(3, verbose=False)
    x = torch.randn(40, 4)
    train = loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    val = DataLoader(TensorDataset(x[:8], x[:8].sum(1, keepdim=True)), batch_size=4)
    trace = Trace(end_at)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=3,
        callbacks=[
            trace,
            LightningCheckpoints(path, resume=resume, save=save or relight.every(steps=1), signals=False),
        ],
        **options,
    )
    try:
        trainer.fit(model or Model(plateau), train, val)
    except Gone:
        trainer.strategy.teardown()
    return trace


CASES = {
    "plain": {},
    "validation in the epoch": {"val_check_interval": 3},
    "validation by steps": {"val_check_interval": 4, "check_val_every_n_epoch": None},
    "validation every second epoch": {"check_val_every_n_epoch": 2},
    "accumulated": {"accumulate_grad_batches": 3},
    "plateau": {"plateau": True},
    "no validation": {"limit_val_batches": 0},
    "half an epoch": {"limit_train_batches": 5},
    "bf16": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ended_after_any_step_it_continues_to_the_bit(case: str, tmp_path) -> None:
    """Repeat the uninterrupted run's losses, rates, own state and validations, wherever the run ends in or between
    epochs."""
    straight = fit(tmp_path / "straight", **CASES[case])
    last = max(step for step, _ in straight.steps)
    for end_at in sorted(
        {1, 4, last // 3 - 1, last // 3, last // 3 + 1, 2 * last // 3, last - 1} & set(range(1, last))
    ):
        first = fit(tmp_path / f"at-{end_at}", end_at=end_at, **CASES[case])
        then = fit(tmp_path / f"at-{end_at}", **CASES[case])
        assert min(then.steps)[0] <= end_at + 1 and len(then.steps) < len(straight.steps), (
            f"{end_at}: it restarted from scratch"
        )
        assert {**first.steps, **then.steps} == straight.steps, end_at
        assert {**first.validated, **then.validated} == straight.validated, end_at


def test_a_finished_run_has_nothing_to_do(tmp_path) -> None:
    """Take no step and raise no error if a finished run is started again."""
    fit(tmp_path / "run")
    assert fit(tmp_path / "run").steps == {}


def test_not_resumed_it_starts_from_scratch_over_an_existing_run(tmp_path) -> None:
    """Train all steps with ``resume=False`` over an interrupted run, as if it did not exist. The next resume continues
    from the new steps."""
    straight = fit(tmp_path / "straight")
    fit(tmp_path / "run", end_at=17)
    before = [checkpoint.id for checkpoint in relight.open(tmp_path / "run").checkpoints()]
    assert fit(tmp_path / "run", resume=False).steps == straight.steps
    third = fit(tmp_path / "run", resume=False, end_at=5)
    assert min(third.steps) == (1, 0)
    after = [checkpoint.id for checkpoint in relight.open(tmp_path / "run").checkpoints()]
    assert after[: len(before)] == before and len(after) > len(before) + len(straight.steps) - 1
    then = fit(tmp_path / "run")
    assert min(then.steps)[0] == 6 and {**third.steps, **then.steps} == straight.steps


def test_a_trial_saves_nothing(tmp_path) -> None:
    """Leave the run unchanged with ``fast_dev_run``."""
    fit(tmp_path / "run", fast_dev_run=True)
    assert not (tmp_path / "run").exists()


def test_the_best_is_kept(tmp_path) -> None:
    """Save with ``relight.best("val_loss")`` after each validation that is better than all before, with its metrics."""
    straight = fit(tmp_path / "run", save=relight.best("val_loss"))
    losses = [
        checkpoint.body.metrics["val_loss"]
        for checkpoint in relight.open(tmp_path / "run").checkpoints()
        if "val_loss" in checkpoint.body.metrics
    ]
    assert losses and losses == sorted(losses, reverse=True) and losses[-1] == min(straight.validated.values())


def test_two_ways_to_restore_are_refused(tmp_path) -> None:
    """Refuse ``ckpt_path=`` with the callback, because one would overwrite the other's restore."""
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=[LightningCheckpoints(tmp_path / "run")],
        plugins=[RelightCheckpointIO()],
        enable_progress_bar=False,
    )
    with pytest.raises(ConfigError, match="ckpt_path"):
        trainer.fit(
            Model(),
            DataLoader(TensorDataset(torch.randn(4, 4), torch.randn(4, 1))),
            ckpt_path=checkpoint_of_io(tmp_path),
        )


def checkpoint_of_io(tmp_path, **options) -> str:
    """Return the path of a checkpoint that ``ModelCheckpoint`` wrote through ``RelightCheckpointIO``."""
    pl.seed_everything(3, verbose=False)
    keeps = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "io", every_n_train_steps=2, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_steps=6,
        callbacks=[keeps], plugins=[RelightCheckpointIO()], **options,
    )  # fmt: skip
    x = torch.randn(40, 4)
    trainer.fit(Model(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
    return str(tmp_path / "io" / "epoch=0-step=4.ckpt")


def test_model_checkpoint_writes_relights_format(tmp_path) -> None:
    """Keep ``ModelCheckpoint``'s names and options. What it writes verifies, and ``ckpt_path=`` resumes from it."""
    path = checkpoint_of_io(tmp_path)
    assert relight.load(path + "/run")["file"]["global_step"] == 4
    assert all(not findings for _, findings in relight.open(path + "/run").verify())
    model = Model()
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=6,
        enable_checkpointing=False,
        plugins=[RelightCheckpointIO()],
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), batch_size=4), ckpt_path=path)
    assert trainer.global_step == 6 and model.seen == 24


def test_pytorch_lightning_gets_its_own() -> None:
    """Provide callbacks of ``pytorch_lightning`` to a script that imported that package."""
    script = (
        "import pytorch_lightning as pl; from relight.integrations.lightning import LightningCheckpoints, RelightCheckpointIO\n"
        "assert issubclass(LightningCheckpoints, pl.callbacks.Checkpoint); import sys; assert 'lightning.pytorch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_own_checkpoints_are_removed(tmp_path) -> None:
    """Refuse to remove a directory that is not a checkpoint."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(CheckpointNotFound):
        RelightCheckpointIO().remove_checkpoint(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    path = checkpoint_of_io(tmp_path)
    RelightCheckpointIO().remove_checkpoint(path)
    assert not (tmp_path / "io" / "epoch=0-step=4.ckpt").exists()


@pytest.mark.shows(
    tool="Lightning", package="lightning", feature="killed and resumed, 2 ranks", outcome="exact", why="gloo"
)
def test_two_ranks_resume_to_the_bit(tmp_path) -> None:
    """Repeat the uninterrupted run's losses on rank 0 with DDP over gloo, killed twice."""
    killed_and_resumed(
        ["examples/lightning_fit.py"], [12, 66], tmp_path, env={"EXAMPLE_RANKS": "2", "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.shows(
    tool="Lightning", package="lightning", feature="killed and resumed", outcome="exact", why="the example"
)
def test_the_example_resumes_to_the_bit(tmp_path) -> None:
    """Repeat the uninterrupted run's losses in the example, killed three times in different epochs."""
    killed_and_resumed(["examples/lightning_fit.py"], [12, 66, 130], tmp_path)


def test_saves_continue_in_the_background(tmp_path) -> None:
    """Repeat the losses with background saves, killed twice."""
    killed_and_resumed(["examples/lightning_fit.py"], [40, 90], tmp_path, background=True)
