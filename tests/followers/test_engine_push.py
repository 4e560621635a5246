"""Engines' servers get each checkpoint that a follower switches to: every tensor, to the byte, also after failures and restarts."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.comm.ports import free_port
from relight.integrations import engines
from relight.integrations.engines import VLLM, SGLang
from relight.observe import Event

LAYERS, WIDTH = 4, 1 << 20  # a chunk of 4 MiB for each layer
NAMES = [f"model.layers.{number}.weight" for number in range(LAYERS)]


def make() -> nn.Module:
    """Return a model with a small tensor of another dtype, with names as Hugging Face gives them."""
    net = nn.Module()
    net.model = nn.Module()
    net.model.layers = nn.ModuleList(nn.Linear(1, WIDTH, bias=False) for _ in range(LAYERS))
    net.model.norm = nn.RMSNorm(7)
    return net


def staging() -> nn.Module:
    """Return the follower's copy, in the engine's dtypes."""
    net = make().bfloat16()
    net.model.norm.float()
    return net


def sums_of(model: nn.Module) -> dict[str, str]:
    """Return the SHA-256 of each tensor in the engine's dtypes."""
    wanted = {name: tensor.dtype for name, tensor in staging().state_dict().items()}
    return {
        name: hashlib.sha256(tensor.to(wanted[name]).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in model.state_dict().items()
    }


class Server:
    """A stand-in in a process of its own, which can be restarted."""

    def __init__(self, kind: str, tp_size: int, folder: Path) -> None:
        self.kind, self.tp_size, self.port, self.shapes = kind, tp_size, free_port(), folder / "shapes.json"
        named = staging().state_dict().items()
        self.shapes.write_text(
            json.dumps({name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in named})
        )
        self.process: subprocess.Popen[bytes] | None = None
        self.from_files = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait for its first answer."""
        program = Path(__file__).with_name("engine_server.py")
        words = [sys.executable, program, self.kind, str(self.port), str(self.tp_size), self.shapes]
        self.process = subprocess.Popen(words)
        ends = time.monotonic() + 60
        while True:
            try:
                self.state()
                return
            except OSError:
                assert time.monotonic() < ends and self.process.poll() is None
                time.sleep(0.05)

    def stop(self) -> None:
        """Kill it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def fail(self, path: str, *works: bool) -> None:
        """Answer the next requests to ``path`` with status 500 where ``works`` is false."""
        data = json.dumps({path: works}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/test/fail", data=data)).close()

    def state(self) -> tuple[dict[str, str], str, bool, list[Any], int]:
        """Return sums, weight version, whether it is paused, the requests since the last call, and flushes of the cache."""
        with urllib.request.urlopen(f"{self.url}/test/state") as answer:
            return tuple(json.loads(answer.read()))

    def sent(self) -> list[str]:
        """Return the names in the updates since the last call, or the files with their numbers of links."""
        return [name for request in self.state()[3] if isinstance(request, list) for name in request[1]]


@pytest.fixture(params=["sglang", "sglang of two ranks", "sglang from files", "vllm"], scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a stand-in. Tests may restart it."""
    kind, _, how = request.param.partition(" ")
    server = Server(kind, 2 if how == "of two ranks" else 1, tmp_path_factory.mktemp("engine"))
    server.from_files = kind == "vllm" or how == "from files"
    server.start()
    yield server
    server.stop()


@pytest.fixture
def pair(server: Server, tmp_path: Path) -> tuple[Server, Any]:
    """The server, and an object that pushes to it."""
    if server.kind == "vllm":
        return server, VLLM(server.url, tmp_path / "weights")
    folder = tmp_path / "weights" if server.from_files else None
    return server, SGLang(server.url, tp_size=server.tp_size, folder=folder, batch=3 * WIDTH)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[nn.Module, Callable[..., None], relight.Follower]]:
    """A trainer's model, a function that changes one of its layers and saves, and a follower."""
    model, steps = make(), iter(range(100))
    ckpt = relight.Checkpointer(tmp_path / "s/run", model=model, background=False, save=relight.every(steps=1))

    def save(*layers: int) -> None:
        for layer in layers:
            model.model.layers[layer].weight.data.normal_()
        ckpt.step(next(steps))

    with ckpt, relight.follow(tmp_path / "s/run", staging()) as follower:
        yield model, save, follower


def test_an_engine_has_every_checkpoint(
    pair: tuple[Server, Any], run: tuple[nn.Module, Callable[..., None], relight.Follower], events: list[Event]
) -> None:
    """At first all tensors are sent, then those that changed. The weight version is the step, and generation continues."""
    (server, engine), (model, save, follower) = pair, run
    flushes = server.state()[4]
    for step in range(4):
        save(step)
        switched = follower.poll()
        pushed = engine.push(follower, switched)
        assert pushed is not None and (pushed.step, pushed.id) == (step, switched.id)
        sums, version, paused, requests, flushed = server.state()
        assert sums == sums_of(model) and (version, paused) == (str(step), False) and flushed == flushes + step + 1
        if step:
            assert NAMES[step] in pushed.names and not set(pushed.names) & (set(NAMES) - {NAMES[step]})
            assert pushed.bytes < 3 * WIDTH
        else:
            assert {*NAMES, "model.norm.weight"} == {*pushed.names} and pushed.bytes == LAYERS * WIDTH * 2 + 28
        assert engine.push(follower, switched) is None
        assert server.sent() == []
    assert [event.fields["step"] for event in events if event.name == "follow.pushed"] == [0, 1, 2, 3]


def test_a_restarted_engine_gets_all_tensors(
    pair: tuple[Server, Any], run: tuple[nn.Module, Callable[..., None], relight.Follower]
) -> None:
    """Its weights are those of its start, as its weight version shows: at the next switch, and without one."""
    (server, engine), (model, save, follower) = pair, run
    save(0)
    engine.push(follower, follower.poll())
    server.stop()
    server.start()
    save(1)
    pushed = engine.push(follower, follower.poll())
    assert pushed is not None and len(pushed.names) == LAYERS + 1 and server.state()[0] == sums_of(model)
    server.stop()
    server.start()
    assert engine.push(follower) is not None
    assert server.state()[0] == sums_of(model)


def test_a_stopped_engine_is_reported_and_gets_all_tensors_later(
    pair: tuple[Server, Any], run: tuple[nn.Module, Callable[..., None], relight.Follower]
) -> None:
    """A refused connection is an error that states what to do; the follower itself continues."""
    (server, engine), (model, save, follower) = pair, run
    save(0)
    engine.push(follower, follower.poll())
    server.stop()
    save(1)
    with pytest.raises(relight.StoreUnavailable, match="(?s)did not answer the request.*push"):
        engine.push(follower, follower.poll())
    server.start()
    save(2)
    pushed = engine.push(follower, follower.poll())
    assert pushed is not None and len(pushed.names) == LAYERS + 1 and server.state()[0] == sums_of(model)


@pytest.mark.parametrize("works", [(False,), (True, False)], ids=["first", "second"])
def test_a_failed_update_is_repeated_whole(
    works: tuple[bool, ...], pair: tuple[Server, Any], run: tuple[nn.Module, Callable[..., None], relight.Follower]
) -> None:
    """After a 500, the engine's weights are unknown: it stays paused, and the next push sends all tensors."""
    (server, engine), (model, save, follower) = pair, run
    save(0)
    engine.push(follower, follower.poll())
    if works[0] and server.from_files:
        pytest.skip("one request has all tensors")
    for path in ("/update_weights_from_tensor", "/update_weights_from_disk", "/collective_rpc"):
        server.fail(path, *works)
    save(1, 2, 3)
    with pytest.raises(relight.StoreUnavailable, match="(?s)HTTP status 500.*push"):
        engine.push(follower, follower.poll())
    assert server.state()[2], "it is not paused"
    pushed = engine.push(follower)
    assert pushed is not None and len(pushed.names) == LAYERS + 1
    sums, version, paused, _, _ = server.state()
    assert sums == sums_of(model) and (version, paused) == ("1", False)
    save(0)
    pushed = engine.push(follower, follower.poll())
    assert pushed is not None and NAMES[0] in pushed.names and NAMES[2] not in pushed.names
    assert server.state()[0] == sums_of(model)


def test_a_missed_switch_is_made_up(
    pair: tuple[Server, Any], run: tuple[nn.Module, Callable[..., None], relight.Follower]
) -> None:
    """What changed in a switch that was not pushed is sent with the next one."""
    (server, engine), (model, save, follower) = pair, run
    save(0)
    engine.push(follower, follower.poll())
    save(1)
    assert follower.poll() is not None
    save(2)
    pushed = engine.push(follower, follower.poll())
    assert pushed is not None and len(pushed.names) == LAYERS + 1
    assert server.state()[0] == sums_of(model)


def test_unchanged_files_are_linked(
    server: Server,
    run: tuple[nn.Module, Callable[..., None], relight.Follower],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only files with a changed tensor are written again, in two directories by turns."""
    monkeypatch.setattr(engines._WeightsFolder, "shard_bytes", 3 * WIDTH)
    if server.kind != "vllm":
        pytest.skip("one of the engines is enough")
    engine = VLLM(server.url, tmp_path / "weights")
    _, save, follower = run
    server.sent()
    (tmp_path / "weights/theirs").mkdir(parents=True)
    for step in range(4):
        save(step)
        engine.push(follower, follower.poll())
        links = [int(file.split()[1]) for file in server.sent()]
        assert len(links) == LAYERS and (step or set(links) == {1})
        assert not step or links.count(1) in (1, 2), "the layer, and the norm if it shares a chunk"
    assert len([*(tmp_path / "weights").iterdir()]) == 3


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    """Before the first switch, without an address, two tensors under one name, and slices."""
    with pytest.raises(relight.ConfigError, match="address of a server"):
        SGLang("localhost:30000")
    engine = SGLang("http://localhost:1", name=lambda name: "same")
    model = nn.Linear(4, 4)
    with relight.follow(tmp_path / "s/run", model) as follower:
        with pytest.raises(relight.ConfigError, match="no checkpoint yet"):
            engine.push(follower)
        with relight.Checkpointer(
            tmp_path / "s/run", model=model, background=False, save=relight.every(steps=1)
        ) as ckpt:
            ckpt.step(0)
        switched = follower.poll()
        with pytest.raises(relight.ConfigError, match="two stored tensors have one name"):
            engine.push(follower, switched)
    with relight.follow(tmp_path / "s/run", model, only="model/bias") as follower:
        switched = follower.poll()
        follower.tensors.clear()
        with pytest.raises(relight.ConfigError, match="no live tensors"):
            engine.push(follower, switched)
    views = engines.engine_views(
        {"weight": torch.zeros(2, 4), "bias": torch.zeros(4)}, sharded={"weight": 0}, tp_size=2
    )
    with relight.follow(tmp_path / "s/run", views) as follower:
        switched = follower.poll()
        with pytest.raises(relight.ConfigError, match="1 live tensors cannot be sent, such as model/weight"):
            engine.push(follower, switched)
