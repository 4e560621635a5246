"""Checkpoints that torch and safetensors write here are imported bit for bit, and restored into the scripts."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from foreign_state import GOLDEN, imported, same
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import relight
from relight.cli import cli
from relight.errors import ConfigError, IncompatibleState
from relight.importers import detect, import_checkpoint
from relight.store import open_bytes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def script(seed: int = 0, *, tied: bool = True) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Return a module with buffers and tied weights, an optimizer with two groups, and a scheduler."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
    )
    if tied:
        model[3].weight = model[2].weight
    groups = [
        {"params": [parameter for parameter in model.parameters() if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in model.parameters() if parameter.ndim < 2]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, optimizer, scheduler


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int, seed: int
) -> list[float]:
    """Train some steps, and return the losses."""
    losses = []
    for step in range(steps):
        torch.manual_seed(seed + step)
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "row of pickles"])
def test_a_script_that_moves_over_goes_on_to_the_bit(tmp_path: Path, zipped: bool) -> None:
    """A ``Checkpointer`` restores a file of ``torch.save``, and the next losses are those of the original script."""
    model, optimizer, scheduler = parts = script()
    train(*parts, 3, 100)
    saved = {
        "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "lr_scheduler": scheduler.state_dict(),
        "epoch": 1, "step": 2, "loss": 0.5,
    }  # fmt: skip
    torch.save(saved, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    detected, report, _ = imported(tmp_path / "x.pt", tmp_path)
    assert (
        report.step == 2
        and detected.metrics == {"loss": 0.5}
        and list(detected.parts) == ["model", "optimizer", "scheduler", "imported"]
    )
    wanted = train(*parts, 3, 200)
    model, optimizer, scheduler = parts = script(seed=9)
    checkpointer = relight.Checkpointer(
        str(tmp_path / "store" / "run"), model=model, optimizer=optimizer, scheduler=scheduler
    )
    checkpointer.restore()
    assert train(*parts, 3, 200) == wanted


def test_an_optimizer_by_number_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Other groups, or other shapes in the same order, are refused before anything is changed."""
    model, optimizer, _ = parts = script()
    train(*parts, 1, 0)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    imported(tmp_path / "x.pt", tmp_path)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    one_group = torch.optim.AdamW(model.parameters())
    turned = torch.optim.AdamW([{"params": group["params"][::-1]} for group in optimizer.param_groups])
    for live in (one_group, turned):
        with pytest.raises(IncompatibleState, match="optimizer"):
            relight.Checkpointer(str(tmp_path / "store" / "run"), model=model, optimizer=live).restore()
        assert same(dict(model.state_dict()), before) and not live.state


def test_every_dtype_and_layout(tmp_path: Path) -> None:
    """Tensors of every layout, numpy's arrays and scalars, and plain values of every kind are imported."""
    base = torch.randn(7, 9)
    tensors: dict[str, Any] = {
        str(dtype): torch.arange(12).to(dtype) if dtype != torch.bool else torch.arange(12) % 2 == 0 for dtype in DTYPES
    }
    tensors |= {
        "t": base.t(),
        "s": base[1:6:2, ::3],
        "e": torch.ones(3, 1).expand(3, 4),
        "0": torch.tensor(3.5),
        "none": torch.empty(0, 3),
        "same": base,
    }
    values = {
        "i": 2**70,
        "c": 1 + 2j,
        "s": {1, 2},
        "t": (1, [2.5, None]),
        "b": b"x",
        "n": np.arange(6).reshape(2, 3),
        "f": np.float32(2),
        3: "int key",
    }
    torch.save({"model": tensors, "more": values}, tmp_path / "x.pt")
    detected, _, state = imported(tmp_path / "x.pt", tmp_path)
    assert same(state["model"], tensors) and not detected.left_out
    more = state["imported"]["more"]
    assert np.array_equal(more.pop("n"), values.pop("n")) and more == values


def test_large_strided_and_tiled_tensors_come_in_by_slabs(tmp_path: Path) -> None:
    """Tensors larger than a slab that are not contiguous are imported correctly."""
    wide = torch.arange(3000 * 2000, dtype=torch.float32).view(3000, 2000)
    torch.save({"w": wide.t(), "x": wide[:, ::2], "y": wide.view(30, 100, 2000).permute(2, 0, 1)}, tmp_path / "x.pt")
    _, _, state = imported(tmp_path / "x.pt", tmp_path)
    assert same(
        state["model"],
        {
            "w": wide.t().contiguous(),
            "x": wide[:, ::2].contiguous(),
            "y": wide.view(30, 100, 2000).permute(2, 0, 1).contiguous(),
        },
    )


def test_safetensors(tmp_path: Path) -> None:
    """A file with every dtype of the format is imported."""
    tensors = {
        str(dtype): torch.arange(12).to(dtype).view(3, 4)
        for dtype in DTYPES
        if dtype not in (torch.bool, torch.complex64, torch.complex128)
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    detected, _, state = imported(tmp_path / "x.safetensors", tmp_path)
    assert (
        detected.kind == "safetensors"
        and same(state["model"], tensors)
        and state["imported"] == {"metadata": {"format": "pt"}}
    )


@pytest.mark.parametrize("flat", [False, True])
def test_dcp(tmp_path: Path, flat: bool) -> None:
    """Module and optimizer, flattened or not, are imported by name, and restored into a plain script."""
    model, optimizer, scheduler = parts = script(tied=False)
    train(*parts, 3, 1)
    optimizer_state = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    dcp.save(
        {"model": model.state_dict(), "optim": optimizer_state, "step": 3, "scheduler": scheduler.state_dict()},
        checkpoint_id=tmp_path / "dcp",
    )
    detected, report, state = imported(tmp_path / "dcp", tmp_path)
    assert detected.kind == "dcp" and report.step == 3 and same(state["model"], dict(model.state_dict()))
    wanted = train(*parts, 2, 7)
    model, optimizer, scheduler = parts = script(seed=4, tied=False)
    relight.Checkpointer(
        str(tmp_path / "store" / "run"), model=model, optimizer=optimizer, scheduler=scheduler
    ).restore()
    assert train(*parts, 2, 7) == wanted


@pytest.mark.parametrize(
    "further",
    [
        {"ema": {"model": {"weight": torch.full((3,), 7.0)}, "decay": 0.999}},
        {"grad": {"model": {"weight": torch.full((3,), 7.0)}}},
        {"rank": {"0": {"model": {"weight": torch.full((3,), 7.0)}}}},
    ],
    ids=lambda further: next(iter(further)),
)
@pytest.mark.parametrize("loose", [False, True], ids=["components", "loose tensors"])
def test_dcp_keeps_an_entry_that_contains_a_second_model(tmp_path: Path, loose: bool, further: dict[str, Any]) -> None:
    """A dict with a second model next to the taken components (EMA, gradients) is kept as values; none is lost."""
    model, optimizer, scheduler = script()
    train(model, optimizer, scheduler, 2, 0)
    entries = {"model": dict(model.state_dict()), "optimizer": get_optimizer_state_dict(model, optimizer)}
    more = {"scale": torch.arange(4.0)} if loose else {}
    dcp.save({**entries, **more, **further}, checkpoint_id=tmp_path / "dcp")
    _, _, state = imported(tmp_path / "dcp", tmp_path)
    assert same(state["model"], dict(model.state_dict()))
    assert same({name: state["imported"][name] for name in further}, further)
    assert not loose or same(state["imported"]["tensors"], more)


def test_dcp_of_a_modules_own_state(tmp_path: Path) -> None:
    """A module's state dict becomes the component ``model``."""
    model, _, _ = script()
    dcp.save(dict(model.state_dict()), checkpoint_id=tmp_path / "dcp")
    _, _, state = imported(tmp_path / "dcp", tmp_path)
    assert same(state["model"], dict(model.state_dict()))


def test_names_that_wrappers_put_before_all(tmp_path: Path) -> None:
    """The prefixes ``module.`` and ``_orig_mod.`` are removed, and a note reports it."""
    torch.save({"module._orig_mod.w": torch.ones(2), "module._orig_mod.b": torch.ones(1)}, tmp_path / "x.pt")
    detected, _, state = imported(tmp_path / "x.pt", tmp_path)
    assert set(state["model"]) == {"w", "b"} and any("module._orig_mod." in note for note in detected.notes)


def test_a_second_import_makes_no_second_checkpoint(tmp_path: Path) -> None:
    """The same source makes one checkpoint. Another source, another step or other parts make another one."""
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}, "step": 5}, tmp_path / "x.pt")
    store = open_bytes(str(tmp_path / "store"))
    first = import_checkpoint(detect(tmp_path / "x.pt"), store, "run")
    again = import_checkpoint(detect(tmp_path / "x.pt"), store, "run")
    assert again.there and not first.there and again.id == first.id
    part = import_checkpoint(detect(tmp_path / "x.pt"), store, "run", which=["ema"])
    later = import_checkpoint(detect(tmp_path / "x.pt"), store, "run", step=6)
    assert len({first.id, part.id, later.id}) == 3 and part.tensors == 1 and later.step == 6
    with pytest.raises(ConfigError, match="is at step 6"):
        import_checkpoint(detect(tmp_path / "x.pt"), store, "run", step=4)
    assert relight.load(str(tmp_path / "store" / "run"), part.id).keys() == {"ema"}
    assert len(relight.open(str(tmp_path / "store" / "run")).checkpoints()) == 3


def test_the_root_records_its_source_and_everything_verifies(tmp_path: Path) -> None:
    """The root has the source's format, name and size, and the reason why a resume is not exact. All parts verify."""
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    detected, report, _ = imported(tmp_path / "x.pt", tmp_path)
    opened = relight.open(str(tmp_path / "store" / "run"))
    root = opened.run().open(opened.latest()).root
    assert (
        root.user["imported"]["name"] == "x.pt" and root.user["imported"]["bytes"] == (tmp_path / "x.pt").stat().st_size
    )
    assert root.reason == "import" and detected.format in root.exact[0] and report.left_out == []
    assert [findings for _, findings in opened.verify()] == [[]]


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """A file of 600 MB is imported with 400 MB of address space in total."""
    with (tmp_path / "x.safetensors").open("wb") as file:
        header = json.dumps({"w": {"dtype": "F32", "shape": [150_000_000], "data_offsets": [0, 600_000_000]}}).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 600_000_000)
    code = (
        "import resource, sys\nfrom relight.importers import detect, import_checkpoint\nfrom relight.store import open_bytes\n"
        "resource.setrlimit(resource.RLIMIT_AS, (400 << 20,) * 2)\n"
        "print(import_checkpoint(detect(sys.argv[1]), open_bytes(sys.argv[2]), 'run').bytes)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x.safetensors"), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "600000000", done.stderr[-800:]
    assert resource.RLIMIT_AS is not None


@pytest.mark.parametrize(("name", "step"), [("step-900.pt", "900"), ("ckpt_2_of_300.pt", "300"), ("last.pt", "")])
def test_a_step_that_only_the_name_has_is_proposed(tmp_path: Path, name: str, step: str) -> None:
    """A file that records no step is imported as step 0, which the report states with the option that changes it."""
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / name)
    dry = CliRunner().invoke(cli, ["import", str(tmp_path / name), str(tmp_path / "r"), "--dry-run"])
    line = next(line for line in dry.output.splitlines() if line.split()[:1] == ["step"])
    assert line.split(maxsplit=1)[1] == "not recorded: 0" + (f" (if it is {step}: --step {step})" if step else "")


def test_the_command(tmp_path: Path) -> None:
    """The command describes the source first. ``--dry-run``, ``--only`` and ``--json`` have their effects."""
    torch.save({"model": {"w": torch.ones(2), "v": torch.ones(3)}, "step": 7}, tmp_path / "x.pt")
    run = str(tmp_path / "runs" / "r")
    dry = CliRunner().invoke(cli, ["import", str(tmp_path / "x.pt"), run, "--dry-run"])
    assert dry.exit_code == 0 and "torch.save file: 2 tensors, 20 B" in dry.output and not (tmp_path / "runs").exists()
    assert max(map(len, dry.output.splitlines())) <= 84
    done = CliRunner().invoke(
        cli, ["import", str(tmp_path / "x.pt"), run, "--only", "model/w", "--json"], standalone_mode=False
    )
    answer = json.loads(done.output)
    assert answer["tensors"] == 1 and answer["step"] == 7 and not answer["there"] and answer["left_out"]
    again = CliRunner().invoke(cli, ["import", str(tmp_path / "x.pt"), run, "--only", "model/w"], standalone_mode=False)
    assert f"{answer['id']}  step 7 of" in again.output and "is there already" in again.output
    other = CliRunner().invoke(cli, ["import", str(tmp_path / "x.pt"), run, "--step", "9"], standalone_mode=False)
    assert "step 9 of" in other.output and other.exit_code == 0
    nothing = CliRunner().invoke(
        cli, ["import", str(tmp_path / "x.pt"), run, "--only", "nothing/*"], standalone_mode=False
    )
    assert isinstance(nothing.exception, IncompatibleState)


def test_what_fsdp_writes_below_an_accelerate_folder(tmp_path: Path) -> None:
    """FSDP's directories of DCP become the model and the optimizer."""
    model, optimizer, scheduler = parts = script(tied=False)
    train(*parts, 2, 1)
    folder = tmp_path / "state"
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / "optimizer_0")
    torch.save(scheduler.state_dict(), folder / "scheduler.bin")
    torch.save({"step": 2}, folder / "random_states_0.pkl")
    detected, report, state = imported(folder, tmp_path)
    assert detected.kind == "accelerate" and report.step == 2 and same(state["model"], dict(model.state_dict()))
    assert set(state["optimizer"]["state"]) == {name for name, _ in model.named_parameters()}
    assert import_checkpoint(detect(folder), open_bytes(str(tmp_path / "store")), "run").there


def test_a_trainer_that_ran_on_deepspeed(tmp_path: Path) -> None:
    """DeepSpeed's partitions are imported together with the Trainer's own files."""
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(GOLDEN / "deep" / "stage2", folder)
    for name in ("trainer_state.json", "rng_state.pth"):
        shutil.copy(GOLDEN / "hugging" / "checkpoint-3" / name, folder)
    detected, _, state = imported(folder, tmp_path)
    assert (
        detected.kind == "zero"
        and "Trainer" in detected.format
        and "rng" in state
        and len(state["optimizer"]["state"]) == 6
    )
    assert state["imported"]["trainer_state"]["global_step"] == 3


def test_a_module_that_was_saved_as_an_object(tmp_path: Path) -> None:
    """The state of a pickled module is its parameters and persistent buffers. Its class is not needed."""
    model, _, _ = script()
    model[1].register_buffer("passing", torch.ones(2), persistent=False)
    torch.save(model, tmp_path / "x.pt")
    detected, _, state = imported(tmp_path / "x.pt", tmp_path)
    assert same(state["model"], dict(model.state_dict())) and any("its class is not" in note for note in detected.notes)
    torch.save({"net": model, "step": 2}, tmp_path / "y.pt")
    _, _, state = imported(tmp_path / "y.pt", tmp_path)
    assert same(state["model"], dict(model.state_dict()))
