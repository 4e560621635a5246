"""Megatron's legacy files of several ranks are joined as Megatron itself cut them, or refused with the reason."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_state import GOLDEN, imported, same
from mega_legacy import LAYERS, WAYS, whole_of

from relight.errors import CorruptCheckpoint, IncompatibleState, UnsafeContent
from relight.importers import detect, import_checkpoint
from relight.store import open_bytes

RANKS = GOLDEN / "mega_ranks"
_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Norms have another name in Megatron's sharded checkpoints."""


def key_of(name: str) -> tuple[str, int | None]:
    """Return Megatron's key of a tensor, which stacks all layers, and the layer's number."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        return name, None
    rest = match[2]
    for mine, theirs in _NORMS.items():
        rest = rest.replace(mine, theirs)
    return f"decoder.layers.{rest}", int(match[1])


@pytest.mark.parametrize("way", sorted(WAYS))
def test_ranks_are_put_together_as_megatron_cut_them(way: str, tmp_path: Path) -> None:
    """For every way of parallelism each tensor equals the whole of ``sharded_state_dict``, and none is missing."""
    detected, report, state = imported(RANKS / way, tmp_path)
    shapes = json.loads((RANKS / way / "whole.json").read_text())
    assert detected.step == report.step == 100 and "legacy" in detected.format and state["scheduler"]["max_lr"] == 0.01
    seen: dict[str, int] = {}
    for name, tensor in state["model"].items():
        key, layer = key_of(name)
        whole = whole_of(key, tuple(shapes[key])).to(tensor.dtype)  # position embeddings are float32
        assert same(tensor, whole if layer is None else whole[layer]), name
        seen[key] = seen.get(key, 0) + 1
    assert seen == {key: LAYERS if key.startswith("decoder.layers.") else 1 for key in shapes}
    assert ("output_layer.weight" in seen) == (not WAYS[way].get("tied", True))
    assert state["imported"]["args"]["num_layers"] == LAYERS


def changed(tmp_path: Path, way: str, change: Callable[[dict[str, Any]], object], ranks: str = "*") -> Path:
    """Return a copy with a change in some ranks' files."""
    folder = tmp_path / "changed"
    shutil.copytree(RANKS / way, folder)
    for path in folder.glob(f"iter_*/mp_rank_{ranks}/*.pt"):
        saved = torch.load(path, weights_only=False)
        change(saved)
        torch.save(saved, path)
    return folder


def with_arguments(**arguments: Any) -> Callable[[dict[str, Any]], object]:
    """Return a change that sets arguments, and removes those that are None."""

    def change(saved_file: dict[str, Any]) -> None:
        merged = {**vars(saved_file["args"]), **arguments}
        saved_file["args"] = Namespace(**{name: value for name, value in merged.items() if value is not None})

    return change


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "without arguments": ("tp2", lambda saved: saved.pop("args"), "arguments lack tensor_model_parallel_size"),
    "without a size": ("tp2", with_arguments(padded_vocab_size=None), "arguments lack padded_vocab_size"),
    "without gating": ("tp2", with_arguments(swiglu=None), "arguments lack swiglu"),
    "of another size": ("tp2", with_arguments(ffn_hidden_size=40), "do not make the 40 of its arguments"),
    "experts": ("tp2", with_arguments(num_experts=8), "num_experts 8"),
    "a layout of stages": (
        "pp2_untied",
        with_arguments(pipeline_model_parallel_layout="Et*3|tL"),
        "pipeline_model_parallel_layout",
    ),
    "other layers": ("tp2_pp2", with_arguments(num_layers=6), "4 layers in 2 stages"),
    "an old order of queries": ("tp2", lambda saved: saved.update(checkpoint_version=1.0), "queries, keys and values"),
    "fewer groups than ranks": ("tp2_gated", with_arguments(num_query_groups=1), "groups of queries"),
    "a tensor of another name": (
        "tp2",
        lambda saved: saved["model"].update({"decoder.layers.0.mixer.weight": torch.ones(4)}),
        "mixer.weight",
    ),
    "an invalid number": ("tp2", with_arguments(num_layers="four"), "arguments lack num_layers"),
}


@pytest.mark.parametrize("why", sorted(REFUSED))
def test_unclear_files_are_refused_with_the_reason(why: str, tmp_path: Path) -> None:
    """Unclear files are refused without a guess, with a hint on what to do."""
    way, change, words = REFUSED[why]
    with pytest.raises(IncompatibleState, match=words) as error:
        detect(changed(tmp_path, way, change))
    assert "torch_dist" in error.value.hint


BROKEN: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "one lacks a tensor": ("01", lambda saved: saved["model"].pop("decoder.final_layernorm.weight"), "not on all"),
    "one is of another shape": (
        "01",
        lambda saved: saved["model"].update({"decoder.final_layernorm.weight": torch.ones(3)}),
        "differs between ranks",
    ),
    "no tensors": ("*", lambda saved: saved.update(model={}), "no tensors"),
    "a layer is missing": (
        "*",
        lambda saved: [saved["model"].pop(n) for n in list(saved["model"]) if ".layers.1." in n],
        "some are missing",
    ),
}


@pytest.mark.parametrize("why", sorted(BROKEN))
def test_ranks_that_do_not_go_together_are_broken(why: str, tmp_path: Path) -> None:
    """Ranks that do not fit together are detected from metadata alone."""
    ranks, change, words = BROKEN[why]
    with pytest.raises(CorruptCheckpoint, match=words):
        detect(changed(tmp_path, "tp2", change, ranks))


@pytest.mark.parametrize("lost", ["mp_rank_00_000", "mp_rank_01_001"])
def test_a_missing_rank_is_named(lost: str, tmp_path: Path) -> None:
    """A missing rank, the first one or another, is reported."""
    shutil.copytree(RANKS / "tp2_pp2", tmp_path / "less")
    shutil.rmtree(tmp_path / "less" / "iter_0000100" / lost)
    with pytest.raises(CorruptCheckpoint, match="missing"):
        detect(tmp_path / "less")


@pytest.mark.parametrize("name", ["decoder.final_layernorm.weight", "embedding.position_embeddings.weight"])
def test_copies_that_differ_do_not_come_in(name: str, tmp_path: Path) -> None:
    """Tensors that must be equal on all ranks are compared while they are read, and nothing is committed."""

    def change(saved_file: dict[str, Any]) -> None:
        saved_file["model"][name].view(-1)[-1] += 1

    detected = detect(changed(tmp_path, "tp2", change, "01"))
    with pytest.raises(CorruptCheckpoint, match="copies that should be equal"):
        import_checkpoint(detected, open_bytes(str(tmp_path / "store")), "run")
    assert not list((tmp_path / "store").glob("run/*-e*"))


def test_a_tied_copy_that_differs_does_not_come_in(tmp_path: Path) -> None:
    """The last stage's copy of the embedding must equal the first stage's."""

    def change(saved_file: dict[str, Any]) -> None:
        saved_file["model"]["output_layer.weight"][0, 0] += 1

    detected = detect(changed(tmp_path, "tp2_pp2", change, "01_001"))
    with pytest.raises(CorruptCheckpoint, match="copies that should be equal"):
        import_checkpoint(detected, open_bytes(str(tmp_path / "store")), "run")


def test_each_ranks_optimizer_is_left_out_and_reported(tmp_path: Path) -> None:
    """Each rank's optimizer is left out with a reason: it has only numbers, different ones on each rank."""
    detected = detect(changed(tmp_path, "tp2", lambda saved: saved.update(optimizer={"state": {}, "param_groups": []})))
    assert [what for what, _ in detected.left_out] == ["optimizer"] and "numbers its parameters" in detected.left_out[
        0
    ][1]


def test_a_scripts_own_arguments_come_in_as_values(tmp_path: Path) -> None:
    """An ``argparse.Namespace`` in a file of ``torch.save`` becomes a dict. One that contains itself is refused."""
    torch.save(
        {"model": {"w": torch.ones(2)}, "args": Namespace(lr=0.1, name="x", inner=Namespace(deep=[1, 2]))},
        tmp_path / "a.pt",
    )
    assert imported(tmp_path / "a.pt", tmp_path)[2]["imported"]["args"] == {
        "lr": 0.1,
        "name": "x",
        "inner": {"deep": [1, 2]},
    }
    within = Namespace()
    within.me = within
    torch.save({"model": {"w": torch.ones(2)}, "args": within}, tmp_path / "b.pt")
    with pytest.raises(UnsafeContent, match="nested too deeply"):
        detect(tmp_path / "b.pt")
