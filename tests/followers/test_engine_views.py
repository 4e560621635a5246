"""An engine's fused weights and slices: filled from a run that stores each weight by itself, and whole."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_decoder import HEAD, HEADS, HIDDEN, KEYS, PADDED, QUERIES, Decoder, engine, expected, fill
from torch import nn

import relight
from relight.comm.ports import free_port
from relight.followers.engine_views import engine_views


def assert_filled(live: dict[str, torch.Tensor], model: Decoder, tp_rank: int, tp_size: int) -> None:
    """All tensors of the rank have the model's values, cast."""
    wanted = expected(model, tp_rank, tp_size)
    assert wanted.keys() == live.keys()
    for name, tensor in live.items():
        assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tp_rank", "tp_size"), [(0, 1), (0, 2), (1, 2), (0, 4), (2, 4), (3, 4)])
def test_fused_weights_and_slices_are_filled(tp_rank: int, tp_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Each rank has its heads, rows and columns of the newest checkpoint, also where ranks share a key's head."""
    model, live = Decoder(), engine(tp_size, dtype)
    views = engine_views(live, heads=HEADS, padded=PADDED, tp_rank=tp_rank, tp_size=tp_size)
    ckpt = relight.Checkpointer(tmp_path / "s/run", model=model, background=False, save=relight.every(steps=1))
    with ckpt, relight.follow(tmp_path / "s/run", views) as follower:
        for step in range(3):
            for parameter in model.layers[step % 2].parameters():
                parameter.data.normal_()
            ckpt.step(step)
            assert follower.poll() is not None
            assert_filled(live, model, tp_rank, tp_size)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_run_of_several_ranks_is_followed_by_slices(tp_size: int, tmp_path: Path) -> None:
    """The ranks of the run and those of the engine cut the weights in different ways."""
    port, program = str(free_port()), Path(__file__).with_name("sharded_decoder.py")
    ranks = [
        subprocess.Popen([sys.executable, program, str(rank), "3", port, tmp_path / "s/run", "0", "1"])
        for rank in range(3)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0, 0]
    model = Decoder()
    fill(model, 1)
    for tp_rank in range(tp_size):
        live = engine(tp_size, torch.bfloat16)
        views = engine_views(live, heads=HEADS, padded=PADDED, tp_rank=tp_rank, tp_size=tp_size)
        with relight.follow(tmp_path / "s/run", views) as follower:
            assert follower.poll() is not None
        assert_filled(live, model, tp_rank, tp_size)


def test_ranks_with_other_slices_switch_together(tmp_path: Path) -> None:
    """Each rank's views have other shapes, and all ranks have the same step after each poll."""
    port, program = str(free_port()), Path(__file__).with_name("sliced_engine.py")
    words = [sys.executable, program]
    ranks = [
        subprocess.Popen([*words, str(rank), "2", port, tmp_path / "s/run", "5"], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    model = Decoder()
    with relight.Checkpointer(tmp_path / "s/run", model=model, background=False, save=relight.every(steps=1)) as ckpt:
        for step in range(6):
            fill(model, step)
            ckpt.step(step)
            time.sleep(0.5)
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    first, second = ([line.split()[0] for line in text.splitlines()] for text in printed)
    assert first == second and first[-1] == "5"


def test_a_module_is_viewed_like_its_tensors() -> None:
    """Parameters and saved buffers; a tied weight by its first name."""
    fused = nn.Module()
    fused.qkv_proj = nn.Linear(HIDDEN, (QUERIES + 2 * KEYS) * HEAD)
    fused.head, fused.tail = nn.Linear(4, 4), nn.Linear(4, 4)
    fused.tail.weight = fused.head.weight
    fused.register_buffer("count", torch.zeros(3))
    fused.register_buffer("table", torch.zeros(3), persistent=False)
    views = engine_views(fused, heads=HEADS)
    assert sorted(views) == sorted(
        ["count", "head.bias", "head.weight", "tail.bias"]
        + [f"{part}.{kind}" for part in HEADS for kind in ("weight", "bias")]
    )
    q, k = views["q_proj.weight"], views["k_proj.weight"]
    assert isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor)
    assert q.data_ptr() == fused.qkv_proj.weight.data_ptr() and k.data_ptr() == q.data_ptr() + q.nbytes


def test_a_rank_reads_only_its_rows(tmp_path: Path) -> None:
    """Of a large weight that is cut along its rows, other ranks' chunks are not read."""
    rows = 8 << 10
    model, live = nn.Module(), torch.zeros(rows // 4, 512)
    model.up_proj = nn.Linear(512, rows, bias=False)  # 16 MiB: four chunks
    views = engine_views({"up_proj.weight": live}, tp_rank=2, tp_size=4)
    ckpt = relight.Checkpointer(tmp_path / "s/run", model=model, background=False, save=relight.every(steps=1))
    with ckpt, relight.follow(tmp_path / "s/run", views) as follower:
        ckpt.step(0)
        switched = follower.poll()
        assert switched is not None and switched.bytes == live.nbytes == 4 << 20
        assert torch.equal(live, model.up_proj.weight.detach()[rows // 2 : rows * 3 // 4])
        model.up_proj.weight.data[: rows // 2] += 1  # of the ranks 0 and 1
        ckpt.step(1)
        switched = follower.poll()
        assert switched is not None and switched.bytes == 0 and switched.changed == ()
        model.up_proj.weight.data[rows * 5 // 8] += 1
        ckpt.step(2)
        switched = follower.poll()
        assert switched is not None and switched.changed == ("model/up_proj.weight",)
        assert torch.equal(live, model.up_proj.weight.detach()[rows // 2 : rows * 3 // 4])


def test_a_weight_that_is_not_stored_is_reported(tmp_path: Path) -> None:
    """An engine's weight without a stored one would keep its random values: that is an error."""
    model = nn.Linear(4, 4)
    with relight.Checkpointer(tmp_path / "s/run", model=model, background=False, save=relight.every(steps=1)) as ckpt:
        ckpt.step(0)
    views = engine_views({"weight": torch.zeros(4, 4), "scale": torch.zeros(4)})
    with relight.follow(tmp_path / "s/run", views) as follower:
        with pytest.raises(relight.IncompatibleState, match="model/scale: missing in the checkpoint"):
            follower.poll()
        assert not torch.count_nonzero(torch.as_tensor(views["weight"]))


def test_stored_names_are_renamed_to_the_engines(tmp_path: Path) -> None:
    """``map=`` of the follower applies before the views' names are compared."""
    model, live = nn.Linear(4, 4, bias=False), torch.zeros(4, 4)
    with relight.Checkpointer(tmp_path / "s/run", policy=model, background=False, save=relight.every(steps=1)) as ckpt:
        ckpt.step(0)
    views = engine_views({"net.weight": live})
    with relight.follow(tmp_path / "s/run", views, map={"policy/*": "model/net.*"}) as follower:
        assert follower.poll() is not None
    assert torch.equal(live, model.weight.detach())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"tp_rank": 2, "tp_size": 2}, "tp_rank=2 of tp_size=2"),
        ({"heads": {"q_proj": 3, "k_proj": 3, "v_proj": 3}, "tp_size": 2}, "3 heads cannot be divided among 2 ranks"),
        ({"heads": {"q_proj": 2}}, "rows cannot be divided"),
        ({"heads": {"q_proj": 5, "k_proj": 1, "v_proj": 1}}, "12 rows cannot be divided into 5 [+] 1 [+] 1 parts"),
        ({"padded": {"*": 99}, "tp_size": 2}, "99 stored rows do not fit into 2 × 4"),
    ],
    ids=["rank", "heads", "some heads", "rows", "padding"],
)
def test_sizes_that_do_not_divide_are_refused(words: dict[str, Any], reason: str) -> None:
    """The error names the weight, and the argument to check."""
    with pytest.raises(relight.ConfigError, match=reason):
        engine_views({"qkv_proj.weight": torch.zeros(12, 2)}, **words)
