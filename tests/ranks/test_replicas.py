"""Replicas must hold equal tensors.

A difference is reported with its tensor and rank, and the checkpoint is suspect.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import relight
from relight.capture.restore_check import Restorable
from relight.capture.tensors import TensorSource
from relight.comm import ThreadGroup
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.commit.multi_rank import OthersFailed
from relight.commit.save import CommitTarget
from relight.errors import CorruptCheckpoint
from relight.format import encode_tree
from relight.format.root_keys import SUSPECT
from relight.layout import Bytes
from relight.log import Log
from relight.observe import counters
from relight.ranks import replicas
from relight.ranks.remote_errors import encode_failure
from relight.ranks.replicas import ReplicaDifference, differences
from relight.ranks.replicas import _sum as sum_of
from relight.ranks.several import SeveralRanks
from relight.store import LocalStore

Messages = tuple[str, str]


def model_of(rank: int, odd: dict[int, str], dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return a model that is equal on all ranks, except one bit in a tensor of some."""
    generator = torch.Generator().manual_seed(0)  # the ranks are threads and share the default generator
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)).to(dtype)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    if rank in odd:
        tensor = model.state_dict()[odd[rank]]
        tensor.view(-1).view(torch.uint8)[-1] ^= 1
    return model


def suspects(
    world: int, odd: dict[int, str], saves: int = 1, late: bool = False, dtype: torch.dtype = torch.float32
) -> list[str]:
    """Return the message of each capture. ``late``: the bit flips after the first."""

    def rank(world_: ThreadGroup) -> list[str]:
        ranks = SeveralRanks(world_, (), 20.0)
        model = model_of(world_.rank, {} if late else odd, dtype)
        messages = []
        for save in range(saves):
            ranks.capture({"model": model}, Restorable(), micro_step=None, recall=None)
            messages.append(ranks.suspect)
            if late and save == 0:
                model.load_state_dict(model_of(world_.rank, odd, dtype).state_dict())
        return messages

    results = ThreadGroup.run(world, rank)
    assert all(result_ == results[0] for result_ in results), "all ranks have the same result"
    return results[0]


def test_equal_replicas_are_not_suspect() -> None:
    """Equal replicas cause no alarm, at the first save and later."""
    assert suspects(3, {}, saves=4) == [""] * 4


@pytest.mark.parametrize("name", ["0.weight", "1.bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_is_enough(name: str, dtype: torch.dtype) -> None:
    """The tensor and the rank that differs from the majority are named."""
    before = counters["replicas.differ"]
    (message,) = suspects(3, {1: name}, dtype=dtype)
    assert message == f"model/{name} on rank 1 is not what it is on 0, 2"
    assert counters["replicas.differ"] > before


def test_two_ranks_have_no_majority() -> None:
    """If two ranks differ from each other, both are named."""
    assert suspects(2, {1: "0.bias"}) == ["model/0.bias is not the same on ranks 0, 1"]


def test_what_changes_later_is_found_in_turns() -> None:
    """Small states are compared completely at each save."""
    assert suspects(3, {2: "0.weight"}, saves=3, late=True) == [
        "",
        *["model/0.weight on rank 2 is not what it is on 0, 1"] * 2,
    ]


def captured(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, int, torch.nn.Module], None]) -> list[Messages]:
    """Return what each capture gives: ``suspect`` and ``turned``. A window has 1 KiB, and the state 4 KiB.

    ``change(capture, rank, model)`` is called before each capture. At the third capture, the state can not be saved.
    """
    monkeypatch.setattr(replicas, "CHECKED_BYTES", 1 << 10)

    def rank(world: ThreadGroup) -> list[Messages]:
        ranks, model = SeveralRanks(world, (), 20.0), torch.nn.Module()
        for number in range(8):
            model.register_buffer(f"part{number}", torch.zeros(128))
        results = []
        for number in range(12):
            change(number, world.rank, model)
            if number == 2:
                with pytest.raises(relight.RelightError):
                    ranks.capture(
                        {"model": model}, Restorable(), micro_step=None, recall=None, failed=CorruptCheckpoint("x")
                    )
            ranks.capture({"model": model}, Restorable(), micro_step=None, recall=None)
            results.append((ranks.suspect, ranks.turned))
        return results

    results = ThreadGroup.run(2, rank)
    assert results[0] == results[1], "all ranks have the same result"
    return list(results[0])


def test_what_differs_from_the_start_is_suspect_at_each_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running statistics differ by design: windows without them are equal, which does not make them broken later."""

    def change(number: int, rank: int, model: torch.nn.Module) -> None:
        model.part0 += rank

    results = captured(monkeypatch, change)
    assert results == [("model/part0 is not the same on ranks 0, 1", "")] * 12


def test_what_differs_later_has_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found within a cycle, next to what differs by design, and is suspect until it is equal again."""

    def change(number: int, rank: int, model: torch.nn.Module) -> None:
        model.part0 += rank
        if number == 5:
            model.part6 += rank
        elif number == 10:
            model.part6.zero_()

    results = captured(monkeypatch, change)
    both = [suspect for suspect, _ in results if "model/part6" in suspect]
    assert all("model/part0" in suspect for suspect, _ in results)
    turns = [number for number, (_, turned) in enumerate(results) if turned]
    assert (
        len(turns) == 1 and 5 <= turns[0] < 9 and results[turns[0]][1] == "model/part6 is not the same on ranks 0, 1"
    ), results
    assert len(both) == 10 - turns[0] and "model/part6" not in results[-1][0], results


def test_a_failed_exchange_of_names_leaves_the_comparison_to_the_next_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first complete comparison counts once its result is known."""
    monkeypatch.setattr(replicas, "CHECKED_BYTES", 16)

    def rank(world: ThreadGroup) -> list[str]:
        ranks, model = SeveralRanks(world, (), 20.0), model_of(world.rank, {1: "1.bias"})
        gather, results = world.gather, []

        def refused(data: bytes, doing: str) -> list[bytes]:
            answers = gather(data, doing)
            return (
                [encode_failure(MemoryError("names"))] * 2
                if len(exchanges.append(doing) or exchanges) == 4
                else answers
            )

        exchanges: list[str] = []
        monkeypatch.setattr(world, "gather", refused)
        for _ in range(3):
            with contextlib.suppress(OthersFailed):
                ranks.capture({"model": model}, Restorable(), micro_step=None, recall=None)
                results.append(ranks.suspect)
        return results

    assert ThreadGroup.run(2, rank) == [["model/1.bias is not the same on ranks 0, 1"] * 2] * 2


@pytest.mark.parametrize("seed", range(3))
def test_sums_see_any_single_change(seed: int) -> None:
    """A changed byte changes the digest, for random bytes of any length."""
    rng = random.Random(seed)
    for _ in range(300):
        data = torch.tensor(list(rng.randbytes(rng.randint(1, 70))), dtype=torch.uint8)
        cut = rng.randrange(len(data))
        begin = cut // 16 * 16
        before = sum_of(TensorSource(data), 0, len(data)), sum_of(TensorSource(data), begin, len(data))
        place = rng.randrange(cut, len(data))
        data[place] ^= 1 << rng.randrange(8)
        assert (
            sum_of(TensorSource(data), 0, len(data)) != before[0]
            and sum_of(TensorSource(data), begin, len(data)) != before[1]
        )


def test_sums_are_of_the_bytes_in_any_layout() -> None:
    """The digest is the same for contiguous, transposed and unaligned tensors, and for their bytes."""
    data = torch.arange(1009, dtype=torch.int16)
    wide = torch.arange(1000, dtype=torch.float32).view(10, 100)
    odd = torch.cat([torch.zeros(3, dtype=torch.int16), data])[3:]
    assert (
        sum_of(TensorSource(odd), 16, 2018)
        == sum_of(TensorSource(data), 16, 2018)
        == sum_of(Bytes(data.numpy().tobytes()), 16, 2018)
    )
    assert sum_of(TensorSource(wide.t()), 0, 4000) == sum_of(TensorSource(wide.t().contiguous()), 0, 4000)


def test_the_odd_ones_are_those_in_the_minority() -> None:
    """Differences are grouped by tensor."""
    digests = {0: [("a", 1), ("b", 5)], 1: [("a", 1), ("b", 6)], 4: [("a", 2), ("b", 5)]}
    assert differences(digests) == [ReplicaDifference("a", (4,), (0, 1, 4)), ReplicaDifference("b", (1,), (0, 1, 4))]


def test_a_suspect_checkpoint_is_marked_and_skipped(tmp_path: Path) -> None:
    """A suspect checkpoint is marked in ls, show and log. ``latest`` skips it with a message; its id restores it."""
    url = str(tmp_path / "store")
    attempt = Attempt.begin(LocalStore(url), "run")

    def rank(one: ThreadGroup) -> str:
        ranks = SeveralRanks(one, (), 20.0)
        made = ""
        for step in range(2):
            model = model_of(one.rank, {1: "0.bias"} if step else {})
            state = ranks.capture({"model": model}, Restorable(), micro_step=None, recall=None)
            place = attempt.place
            mine = Attempt(
                CommitTarget(LocalStore(url), Log(LocalStore(url), "run"), place.store_id, place.run_id, place.epoch)
            )
            made = mine.save(
                SaveRequest(
                    SaveInfo(
                        step=step, components=state.kinds, user={SUSPECT.name: ranks.suspect} if ranks.suspect else {}
                    ),
                    tree=encode_tree(state.tree),
                    items=state.items,
                    id=ranks.id_of(place),
                    seat=ranks.seat,
                )
            ).id
        return made

    newest = ThreadGroup.run(3, rank)[0]
    assert [checkpoint.body.suspect for checkpoint in relight.open(f"{url}/run").checkpoints()] == [False, True]
    before = counters["restore.skipped"]
    model = model_of(0, {})
    ckpt = relight.Checkpointer(f"{url}/run", model=model, signals=False, background=False)
    assert ckpt.restore() == 1, "the checkpoint before the suspect one"
    assert counters["restore.skipped"] == before + 1
    assert ckpt.restore(newest) == 2
    ckpt.close(save=False)
    assert "model/0.bias on rank 1 is not what it is on 0, 2" in printed("show", f"{url}/run@{newest}")
    assert [checkpoint["suspect"] for checkpoint in json.loads(printed("ls", f"{url}/run", "--json"))] == [False, True]


def printed(*arguments: str) -> str:
    """Run a command and return its output."""
    return subprocess.run(
        [sys.executable, "-m", "relight", *arguments], capture_output=True, text=True, check=True, timeout=60
    ).stdout
