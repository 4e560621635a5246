"""Checkpoints that the frameworks themselves wrote are imported bit for bit, without any of those frameworks."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deep import Net, groups
from foreign_state import GOLDEN, by_number, imported, same
from mega import KEYS, whole

import relight
from relight.capture.rng import restore_host
from relight.importers import detect


def expected(folder: str) -> dict[str, Any]:
    return torch.load(GOLDEN / folder / "expected.pt", weights_only=True)


def optimizer_is(node: dict[str, Any], saved: dict[str, Any]) -> None:
    """Check that an optimizer has the same state, and the same settings except names."""
    mine = by_number(node)
    assert same(mine["state"], saved["state"])
    for group, other in zip(mine["param_groups"], saved["param_groups"], strict=True):
        assert {key: value for key, value in other.items() if key != "param_names"} == group


def test_hugging_face_trainer(tmp_path: Path) -> None:
    """All parts of a Trainer's checkpoint are imported. Tied weights exist once, as saved."""
    detected, report, state = imported(GOLDEN / "hugging" / "checkpoint-3", tmp_path)
    original = expected("hugging")
    assert detected.kind == "trainer" and detected.step == report.step == 3 and detected.metrics["loss"] > 0
    assert same(state["model"], {key: value for key, value in original["model"].items() if key != "lm_head.weight"})
    optimizer_is(state["optimizer"], original["optimizer"])
    assert state["scheduler"]["last_epoch"] == 3 and state["rng"]["torch"].dtype == torch.uint8
    assert state["imported"]["trainer_state"]["global_step"] == 3
    assert ("training_args.bin") in dict(detected.left_out)


def test_hugging_face_generators_continue_their_sequences(tmp_path: Path) -> None:
    """The restored generators draw the same numbers that the saved ones would have drawn."""
    imported(GOLDEN / "hugging" / "checkpoint-3", tmp_path, which=["rng"])
    saved = torch.load(GOLDEN / "hugging" / "checkpoint-3" / "rng_state.pth", weights_only=False)
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["cpu"])
    wanted = random.random(), float(np.random.rand()), float(torch.rand(()))
    restore_host(relight.load(str(tmp_path / "store" / "run"))["rng"])
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == wanted


def test_hugging_face_sharded_folder(tmp_path: Path) -> None:
    """A folder with an index is imported as one module."""
    detected, _, state = imported(GOLDEN / "hugging" / "sharded", tmp_path)
    original = expected("hugging")["model"]
    assert detected.kind == "hf" and same(
        state["model"], {key: value for key, value in original.items() if key != "lm_head.weight"}
    )


def test_lightning(tmp_path: Path) -> None:
    """Module, optimizer and scheduler are imported. Loops and callbacks are kept as values."""
    detected, report, state = imported(GOLDEN / "light" / "last.ckpt", tmp_path)
    original = expected("light")
    assert detected.kind == "lightning" and report.step == 6 and "2." in detected.format
    assert same(state["model"], original["model"])
    optimizer_is(state["optimizer"], original["optimizer"])
    assert state["scheduler"]["last_epoch"] == 2 and state["imported"]["hyper_parameters"] == {"width": 6}


def test_accelerate(tmp_path: Path) -> None:
    """The parameters have names, so the optimizer's state is stored by name."""
    detected, report, state = imported(GOLDEN / "accel" / "state", tmp_path)
    original = expected("accel")
    assert detected.kind == "accelerate" and report.step == 3
    assert same(state["model"], original["model"]) and set(state["optimizer"]["state"]) == set(original["model"])
    optimizer_is(state["optimizer"], original["optimizer"])
    assert state["scheduler"]["last_epoch"] == 3 and {"python", "numpy", "torch"} <= state["rng"].keys()


def universal(stage: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the universal checkpoint that DeepSpeed itself makes of its partitions."""
    parameters: dict[str, dict[str, torch.Tensor]] = {}
    for path in sorted((GOLDEN / "deep" / f"universal{stage}" / "zero").glob("*/*.pt")):
        value = torch.load(path, weights_only=False)
        parameters.setdefault(path.parent.name, {})[path.stem] = value["param"] if isinstance(value, dict) else value
    return parameters


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_put_together_as_deepspeed_does(tmp_path: Path, stage: int) -> None:
    """The joined weights, moments and steps of two ranks equal those of DeepSpeed's own universal checkpoint."""
    detected, report, state = imported(GOLDEN / "deep" / f"stage{stage}", tmp_path)
    assert detected.kind == "zero" and f"stage {stage}, 2 ranks" in detected.format and report.step == 3
    original = universal(stage)
    trained = {name for name, parts in original.items() if "exp_avg" in parts}
    assert set(state["optimizer"]["state"]) == trained and len(trained) == 6
    for name in trained:
        # flat in stage 3
        assert same(state["model"][name].view(original[name]["fp32"].shape), original[name]["fp32"]), name
        assert state["model"][name].shape == dict(Net().named_parameters())[name].shape
        for key in ("exp_avg", "exp_avg_sq"):
            assert same(state["optimizer"]["state"][name][key].view(original[name][key].shape), original[name][key]), (
                name,
                key,
            )
        assert float(state["optimizer"]["state"][name]["step"]) == 3
    assert state["model"]["frozen.weight"].dtype == torch.bfloat16 and state["model"]["frozen.weight"].shape == (7, 7)
    assert torch.equal(state["model"]["scale"], torch.linspace(0.5, 1.5, 7))
    assert [group["weight_decay"] for group in state["optimizer"]["param_groups"]] == [0.0, 0.1]
    assert state["scheduler"]["last_epoch"] == 3 and state["imported"]["note"] == "kept"


@pytest.mark.parametrize("stage", [1, 3])
def test_universal(tmp_path: Path, stage: int) -> None:
    """A universal checkpoint is imported unchanged."""
    detected, _, state = imported(GOLDEN / "deep" / f"universal{stage}", tmp_path)
    assert detected.kind == "universal"
    for name, parts in universal(stage).items():
        weight = parts.pop("fp32")
        assert state["model"][name].shape == dict(Net().state_dict())[name].shape
        assert same(state["model"][name].view(weight.shape), weight)
        for key, value in parts.items():
            assert same(state["optimizer"]["state"][name][key].view(value.shape), value)


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_goes_into_a_plain_script(tmp_path: Path, stage: int) -> None:
    """A module and torch's own AdamW, with the same groups, restore the state of ZeRO's ranks."""
    _, _, state = imported(GOLDEN / "deep" / f"stage{stage}", tmp_path)
    model = Net()
    model.frozen.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(groups(model), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    relight.Checkpointer(
        str(tmp_path / "store" / "run"), model=model, optimizer=optimizer, scheduler=scheduler
    ).restore()
    assert same(dict(model.state_dict()), {key: state["model"][key] for key in model.state_dict()})
    assert same(optimizer.state[model.first.weight]["exp_avg"], state["optimizer"]["state"]["first.weight"]["exp_avg"])
    assert scheduler.last_epoch == 3


@pytest.mark.parametrize("stage", [1, 2])
def test_a_tied_weight_of_zero_has_the_tensor_of_its_first_name(tmp_path: Path, stage: int) -> None:
    """ZeRO stores the fp32 weight under the first name. The other names have a 16-bit copy, which must not be taken."""
    shutil.copytree(GOLDEN / "deep" / f"stage{stage}", tmp_path / "tied")
    (path,) = (tmp_path / "tied").rglob("mp_rank_00_model_states.pt")
    saved = torch.load(path, weights_only=False)
    saved["module"]["head.weight"] = saved["module"]["last.weight"]
    saved["shared_params"] = {"head.weight": "last.weight"}
    torch.save(saved, path)
    _, _, state = imported(tmp_path / "tied", tmp_path)
    assert state["model"]["head.weight"].dtype == torch.float32
    assert torch.equal(state["model"]["head.weight"], state["model"]["last.weight"])
    model = Net()
    model.head = torch.nn.Linear(7, 4, bias=False)
    model.head.weight = model.last.weight
    model.frozen.bfloat16()
    relight.Checkpointer(str(tmp_path / "store" / "run"), model=model, background=False).restore(only=["model/*"])
    assert torch.equal(model.head.weight, state["model"]["last.weight"])


def test_deepspeed_without_zero(tmp_path: Path) -> None:
    """The module is imported. An optimizer in DeepSpeed's own form is left out, and the result reports it."""
    detected, _, state = imported(GOLDEN / "deep" / "stage0", tmp_path)
    assert detected.kind == "deepspeed" and state["model"]["first.weight"].shape == (7, 5)
    assert "optimizer" in dict(detected.left_out)


@pytest.mark.parametrize(
    "source", ["hugging/checkpoint-3", "light/last.ckpt", "accel/state", "deep/stage2", "deep/universal2"]
)
def test_none_of_it_needs_torch_or_the_framework(source: str) -> None:
    """Detection imports neither torch nor the framework that wrote the checkpoint."""
    script = (
        "import sys; from relight.importers import detect; detect(sys.argv[1]);"
        "print(sorted({'torch', 'safetensors', 'deepspeed', 'lightning', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(GOLDEN / source)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_rank_that_is_missing_is_noticed(tmp_path: Path) -> None:
    """Two ranks wrote files, but only one file exists: an error reports it."""
    shutil.copytree(GOLDEN / "deep" / "stage2", tmp_path / "cut")
    next((tmp_path / "cut").rglob("*rank_1_*optim*")).unlink()
    with pytest.raises(relight.CorruptCheckpoint, match="files of 1 rank"):
        detect(tmp_path / "cut")


def test_torchsnapshot(tmp_path: Path) -> None:
    """Components, raw buffers, objects and plain entries are imported by their kinds."""
    detected, report, state = imported(GOLDEN / "snap" / "snapshot", tmp_path)
    original = expected("snap")
    assert detected.kind == "torchsnapshot" and report.step == 3
    assert same(state["model"], dict(original["model"]))
    optimizer_is(state["optimizer"], original["optimizer"])
    progress = state["imported"]["progress"]
    assert same(
        progress,
        {"step": 3, "note": "kept", "rate": 0.25, "flag": True, "raw": b"abc", "table": {"a": [1, torch.ones(2)]}},
    )


def test_megatron_torch_dist(tmp_path: Path) -> None:
    """Pieces of two tensor-parallel ranks and of stacked layers are joined, in the model and in its optimizer."""
    detected, report, state = imported(GOLDEN / "mega", tmp_path)
    original = whole()
    assert detected.kind == "megatron" and "torch_dist" in detected.format and report.step == 100
    assert same(state["model"], {name: tensor for name, tensor in original.items() if not name.startswith("optimizer")})
    for name in state["model"]:
        moments = {**state["optimizer"]["state"][name], "fp32_param": state["optimizer"]["masters"][name]}
        assert same(moments, {key: original[f"optimizer.state.{key}.{name}"] for key in moments}) and set(
            moments
        ) == set(KEYS)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.01 and state["scheduler"]["max_lr"] == 0.01


def test_megatron_legacy(tmp_path: Path) -> None:
    """One rank's file is imported as a model. Several without arguments are refused, with a hint on what to do."""
    with pytest.raises(relight.IncompatibleState, match="2 model-parallel ranks") as error:
        detect(GOLDEN / "mega" / "legacy")
    assert "torch_dist" in error.value.hint
    shutil.copytree(GOLDEN / "mega" / "legacy", tmp_path / "one")
    shutil.rmtree(tmp_path / "one" / "iter_0000100" / "mp_rank_01")
    detected, _, state = imported(tmp_path / "one", tmp_path)
    assert detected.step == 100 and state["model"]["embedding.word_embeddings.weight"].shape == (8, 6)


@pytest.mark.parametrize("joinable", [True, False])
def test_deepspeeds_model_parallel_ranks_are_refused_with_the_reason(tmp_path: Path, joinable: bool) -> None:
    """The hint depends on whether the files state how to join them."""
    shutil.copytree(GOLDEN / "deep" / "stage1", tmp_path / "zero")
    (folder,) = {path.parent for path in (tmp_path / "zero").rglob("mp_rank_00_model_states.pt")}
    saved = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    if joinable:
        saved["universal_checkpoint_info"] = {
            "universal_checkpoint_version": 0.2,
            "tp_replicated_parameter_patterns": [".*norm.*"],
        }
    for rank in range(2):
        torch.save(saved, folder / f"mp_rank_{rank:02d}_model_states.pt")
    with pytest.raises(relight.IncompatibleState, match="pieces of 2 model-parallel ranks") as error:
        detect(tmp_path / "zero")
    assert ("ds_to_universal" in error.value.hint) is joinable
    assert ("tp_replicated_parameter_patterns" in error.value.what) is joinable


@pytest.mark.parametrize("form", ["files", "ocdbt", "files3", "ocdbt3"])
def test_orbax(tmp_path: Path, form: str) -> None:
    """A tree of zarr 2 or 3 arrays, in files or in an OCDBT, is imported by name."""
    detected, report, state = imported(GOLDEN / "orb" / form, tmp_path)
    original = np.load(GOLDEN / "orb" / "expected.npz")
    assert detected.kind == "orbax" and report.step == 3
    assert same(
        state["params"],
        {"dense.kernel": torch.from_numpy(original["kernel"]), "dense.bias": torch.from_numpy(original["bias"])},
    )
    assert same(state["imported"]["half"], torch.arange(5).bfloat16())
