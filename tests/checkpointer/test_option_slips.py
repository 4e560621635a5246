"""Options that are misspelt, another framework's, or of another type: an error at construction that names the way out."""

from __future__ import annotations

import datetime
import enum
import inspect
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relight
from relight.checkpointer import option_names
from relight.errors import ConfigError
from relight.policy import Adaptive

OPTIONS = frozenset(inspect.signature(relight.Checkpointer).parameters) - {"path", "components"}


class Phase(enum.Enum):
    """A stage of a training."""

    WARM, MAIN = "warm", "main"


def made(path: Any, **options: Any) -> relight.Checkpointer:
    """A Checkpointer of a small model."""
    return relight.Checkpointer(path, model=torch.nn.Linear(2, 2), **options)


@pytest.mark.parametrize(
    ("slip", "hint"),
    [
        ({"save_every": 10}, "save=relight.every(steps=10)"),
        ({"save_steps": 500}, "save=relight.every(steps=500)"),
        ({"every_n_train_steps": 100}, "save=relight.every(steps=100)"),
        ({"save_interval": 20}, "save=relight.every(steps=20)"),
        ({"SaveInterval": 20}, "save=relight.every(steps=20)"),
        ({"every_n_epochs": 1}, "every(epochs="),
        ({"save_top_k": 3}, "keep=relight.keep(best=3"),
        ({"monitor": "val_loss"}, "save=relight.best("),
        ({"max_to_keep": 5}, "keep=relight.keep(last=5)"),
        ({"save_total_limit": 2}, "keep=relight.keep(last=2)"),
        ({"keep_last": 3}, "keep=relight.keep(last=3)"),
        ({"async_save": True}, "background=True"),
        ({"dirpath": "ckpts"}, "first argument"),
        ({"output_dir": Path("ckpts")}, "first argument"),
        ({"checkpoint_dir": "ckpts"}, "first argument"),
        ({"resume": True}, "ckpt.restore()"),
        ({"resume_from_checkpoint": "x"}, "ckpt.restore()"),
        ({"backgroud": False}, "did you mean background=?"),
        ({"on_failures": "raise"}, "did you mean on_failure=?"),
        ({"per_ranks": "data"}, "did you mean per_rank=?"),
        ({"scheduler": torch.optim.lr_scheduler.LambdaLR}, "not its class: scheduler=LambdaLR("),
        pytest.param({"data": iter([])}, "iterates over: data=loader", id="an-iterator"),
        pytest.param({"model2": iter([])}, "iterates over: model2=model2", id="an-iterator-by-its-name"),
        ({"Signals": False}, "did you mean signals=?"),
        ({"metadta": None}, "did you mean metadata=?"),
        ({"saves": relight.every(10)}, "did you mean save=?"),
        ({"retain": relight.keep(last=2)}, "did you mean keep=?"),
        ({"limit": relight.Limits()}, "did you mean limits=?"),
        ({"small": relight.Compact()}, "did you mean compact=?"),
        ({"policy": relight.failure_policy(retries=1)}, "did you mean on_failure=?"),
        ({"nodes": relight.Peers(copies=1)}, "did you mean peers=?"),
        ({"tier": relight.tier("a/b")}, "first argument"),
        ({"tiers": relight.Tiers(hot="a/b")}, "first argument"),
        ({"sate": {"epoch": 0}}, "did you mean state=?"),
        ({"metadat": {"lr": 0.1}}, "did you mean metadata=?"),
        ({"limist": {"threads": 1}}, "did you mean limits=?"),
        ({"per_rnk": ["data"]}, "did you mean per_rank=?"),
        ({"epoch": 0}, "state={'epoch': 0}"),
        ({"best_value": float("inf")}, "state={'best_value': inf}"),
        ({"raw": b"x"}, "state={'raw': b'x'}"),
        ({"save_every": None}, "save=relight.every(steps=…)"),
        ({"backgroud": None}, "did you mean background=?"),
        ({"begun": datetime.date(2026, 1, 1)}, "a component is a module"),
        ({"device": torch.device("cpu")}, "a component is a module"),
        ({"fn": print}, "a component is a module"),
        ({"head": torch.nn.Linear}, "head=Linear(…)"),
        ({"logger": logging.getLogger()}, "a component is a module"),
    ],
    ids=str,
)
def test_a_keyword_that_is_neither_option_nor_component_is_refused(
    tmp_path: Path, slip: dict[str, Any], hint: str
) -> None:
    """A misspelt or foreign option never becomes a component: the error names it, and the option that was meant."""
    with pytest.raises(ConfigError, match=re.escape(repr([*slip][0]))) as caught:
        made(tmp_path / "store" / "run", **slip)
    assert hint in caught.value.hint, caught.value.hint
    assert not (tmp_path / "store").exists()


def test_an_object_with_state_is_a_component_under_any_name(tmp_path: Path) -> None:
    """Containers, arrays, tensors and NumPy's values stay components, also where their names resemble an option's."""
    parts: dict[str, Any] = {
        "stats": {"seen": 1}, "states": [1, 2], "signal": np.ones(3), "limi": torch.ones(2), "seen": np.int64(3), "log": [], "names": ("a", "b"),
        "draws": torch.Generator(), "kinds": {1, 2}, "epochs": torch.tensor(3), "best_loss": np.float64(2.5),
        "ema": None, "phase": Phase.MAIN,
    }  # fmt: skip
    with made(tmp_path / "run", save=None, **parts) as ckpt:
        ckpt.save(0)
    second = made(
        tmp_path / "run", save=None, **{**parts, "stats": {}, "log": [], "seen": np.int64(0), "phase": Phase.WARM}
    )
    second.restore()
    assert (
        second["stats"] == {"seen": 1}
        and second["seen"] == 3
        and second["phase"] is Phase.MAIN
        and second["ema"] is None
    )


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"optimizers": [0, 1]}, ["optimizers.0", "optimizers.1"]), ({"optimizers": {"matrices": 0, "rest": 1}}, ["optimizers.matrices", "optimizers.rest"]),
        ({"all": {"first": (0,), "second": {"rest": 1}}}, ["all.first.0", "all.second.rest"]),
    ],
    ids=["list", "dict", "nested"],
)  # fmt: skip
@pytest.mark.parametrize("by_state", [False, True])
def test_containers_of_components_are_taken_apart(
    tmp_path: Path, given: dict[str, Any], names: list[str], by_state: bool
) -> None:
    """Save each optimizer of a list, tuple or dict as its own component, named by the container and its position."""

    def objects(lr: float) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        model = torch.nn.Linear(2, 2)
        return model, [torch.optim.SGD([model.weight], lr=lr), torch.optim.Adam([model.bias], lr=lr)]

    def placed(value: Any, optimizers: list[torch.optim.Optimizer]) -> Any:
        if isinstance(value, dict):
            return {key: placed(entry, optimizers) for key, entry in value.items()}
        return (
            type(value)(placed(entry, optimizers) for entry in value)
            if isinstance(value, (list, tuple))
            else optimizers[value]
        )

    def build(lr: float) -> tuple[relight.Checkpointer, list[torch.optim.Optimizer]]:
        model, optimizers = objects(lr)
        parts = placed(given, optimizers)
        options = {"state": {"model": model, **parts}} if by_state else {"model": model, **parts}
        return relight.Checkpointer(tmp_path / "run", save=None, background=False, **options), optimizers

    ckpt, _ = build(0.25)
    ckpt.save(0)
    ckpt.close()
    assert [name for name in relight.load(tmp_path / "run") if name not in ("model", "rng")] == names
    second, optimizers = build(0.5)
    second.restore()
    second.close(save=False)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.25, 0.25]


def test_a_container_of_components_and_plain_values_is_refused(tmp_path: Path) -> None:
    """A restore would have to put the plain values back into a container that was taken apart."""
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="parts= holds a component, parts.model, and a plain value, parts.epoch"):
        relight.Checkpointer(tmp_path / "run", parts={"model": model, "epoch": 0})
    with pytest.raises(ConfigError, match=r"component 'nets.0' is given twice"):
        relight.Checkpointer(tmp_path / "run", state={"nets.0": model, "nets": [model]})


def test_state_takes_any_name_and_any_plain_value(tmp_path: Path) -> None:
    """Set and restore plain values of ``state={…}`` by name, without guessing."""
    plain = {"save_every": 10, "epoch": 3, "sate": {"a": 1}, "name": "x", "nothing": None}
    with made(tmp_path / "run", save=None, state=plain) as ckpt:
        ckpt["epoch"] = 4
        ckpt.save(0)
    again = made(tmp_path / "run", save=None, state=dict.fromkeys(plain))
    again.restore()
    assert {name: again[name] for name in plain} == {**plain, "epoch": 4}


def test_every_answer_for_other_frameworks_names_something_that_exists() -> None:
    """Name a real option, a method of the Checkpointer, or its first argument in each answer. No entry is one of
    Relight's options."""
    for name, meant in option_names._MEANT.items():
        assert name not in OPTIONS, name
        options = set(re.findall(r"(\w+)=", meant)) & OPTIONS
        calls = [name_ for name_ in re.findall(r"ckpt\.(\w+)\(", meant) if hasattr(relight.Checkpointer, name_)]
        functions = [name_ for name_ in re.findall(r"relight\.(\w+)\(", meant) if not hasattr(relight, name_)]
        assert not functions, (name, functions)
        words = ("first argument", "close()", "components:", "relight.best", "torch.distributed", "logging.getLogger")
        assert options or calls or any(word in meant for word in words), (name, meant)


@pytest.mark.parametrize(
    "options",
    [
        {"save": 500}, {"save": "10m"}, {"save": True}, {"save": False}, {"save": relight.adaptive}, {"save": {"steps": 5}},
        {"keep": 3}, {"keep": {"last": 3}}, {"keep": relight.keep}, {"limits": {"threads": 3}}, {"limits": relight.Limits},
        {"compact": "zstd"}, {"compact": 1}, {"peers": 2}, {"peers": {"copies": 1}}, {"on_failure": None}, {"on_failure": ["warn"]},
        {"on_failure": "Warn"}, {"on_failure": {}}, {"signals": "no"}, {"signals": None}, {"signals": 0}, {"background": "no"}, {"background": 0},
        {"metadata": ["x"]}, {"metadata": "x"}, {"metadata": {"a": np.float32(1)}}, {"metadata": {"a": torch.ones(1)}},
        {"metadata": {"a": "\ud800"}}, {"metadata": {"a": 2**70}}, {"metadata": {1: 2}}, {"metadata": {"a": float("nan")}},
        {"metadata": {"a": {(1, 2): 3}}}, {"metadata": {"relight.micro_step": 3}}, {"metadata": {"a": "x" * (1 << 21)}},
        {"state": ["x"]}, {"state": "x"}, {"state": torch.nn.Linear(1, 1)}, {"state": {1: 2}}, {"state": {"a\ud800": 2}}, {"state": {"a\n": 2}},
        {"per_rank": "abc"}, {"per_rank": ["abc"]}, {"per_rank": [1]}, {"per_rank": None}, {"writer": 0}, {"writer": None}, {"writer": ["rank 0"]},
        {"run": 3}, {"run": Path("demo")}, {"run": ""}, {"encrypt": 3}, {"encrypt": {"a": 1}}, {"sign": 3}, {"trust": 3}, {"anchor": 3},
    ],
    ids=lambda one: re.sub(r" at 0x[0-9a-f]+", "", str(one))[:60],  # workers must collect the same names
)  # fmt: skip
def test_an_option_of_another_type_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """Check each option at construction, before anything is written."""
    with pytest.raises(ConfigError) as caught:
        made(tmp_path / "store" / "run", **options)
    assert [*options][0] in str(caught.value) or "run" in options, str(caught.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "path",
    [None, 3, "", "  ", ".", b"runs/demo", Path(), ["runs/demo"], torch.nn.Linear(1, 1), relight.tier("a/b")],
    ids=str,
)
def test_an_invalid_path_is_refused(path: Any) -> None:
    """A path is a text, a Path or Tiers, and names a store and a run."""
    with pytest.raises(ConfigError):
        made(path)


@pytest.mark.parametrize("below", ["", "demo"])
def test_a_file_is_not_a_run(tmp_path: Path, below: str) -> None:
    """A file where the run or its store would be is refused before training begins, not at the first save."""
    (tmp_path / "model.pt").write_bytes(b"weights")
    with pytest.raises(ConfigError, match=r"model.pt is a file"):
        made(tmp_path / "model.pt" / below)
    assert (tmp_path / "model.pt").read_bytes() == b"weights"


def test_without_save_a_run_saves_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use ``relight.adaptive()`` by default. ``save=None`` saves only on request, on signals and at the end, whatever a
    file sets."""

    def trigger(**options: Any) -> Any:
        ckpt = made(tmp_path / "run", signals=False, **options)
        trigger_ = ckpt._options.trigger
        ckpt.close()
        return trigger_

    assert trigger() == relight.adaptive() and isinstance(trigger(), Adaptive)
    assert trigger(save=None) is None
    file = tmp_path / "relight.toml"
    file.write_text("[checkpoint.every]\nsteps = 1\n[checkpoint.keep]\nlast = 1\n")
    monkeypatch.setenv("RELIGHT_SETTINGS", str(file))
    assert trigger() == relight.every(1)
    assert trigger(save=None) is None
    with made(tmp_path / "all", save=relight.every(1), keep=None, background=False) as ckpt:
        for step in range(3):
            ckpt.step(step)
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "all").checkpoints()] == [0, 1, 2], (
        "keep=None keeps everything, whatever a file sets"
    )


def test_restore_arguments_of_another_type_are_refused(tmp_path: Path) -> None:
    """Refuse a text as a list of patterns in ``restore``, and an invalid selector."""
    wrong: list[dict[str, Any]] = [
        {"only": "model/*"}, {"only": [1]}, {"strict": "no"}, {"map": ["a"]}, {"which": None}, {"which": ""}, {"which": -1}, {"which": 2.0},
        {"which": True}, {"which": Path("x")}, {"which": torch.ones(2)},
    ]  # fmt: skip
    ckpt = made(tmp_path / "run")
    ckpt.save(0)
    for arguments in wrong:
        with pytest.raises(ConfigError):
            ckpt.restore(**arguments)
    ckpt.close()
