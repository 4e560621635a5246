"""Inference engines in processes of their own, brought to a follower's checkpoint: SGLang and vLLM.

The follower's live tensors are a copy of the weights in the engine's dtype, under the names that the engine loads. After a switch, ``push``
sends them by the engine's documented requests. Tested against stand-ins of the engines' servers, not with the engines.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from relight.capture.tensors import dtype_name, memory_of
from relight.errors import ConfigError, RelightError, StoreUnavailable
from relight.followers.engine_views import FUSED, SHARDED, engine_views
from relight.followers.follower import Follower, Switched
from relight.format.pack import encode_header
from relight.http_request import request, url_shown, without_user
from relight.observe import emit
from relight.settings.amounts import bytes_of, seconds_of
from relight.settings.short_traceback import short_traceback
from relight.store.durable import translate
from relight.units import Duration, Size

__all__ = ["FUSED", "SHARDED", "VLLM", "Pushed", "SGLang", "engine_views"]
_ANSWER_BYTES_MAX = 1 << 20
_AGAIN = "push() again: it then sends all tensors. Until it succeeds, the engine may stay paused, as its weights may be a mixture"

Weights = dict[str, torch.Tensor]


class Pushed(NamedTuple):
    """What an engine was sent. ``names``: the engine's names of the tensors. ``bytes``: theirs, once."""

    step: int
    id: str
    names: tuple[str, ...]
    bytes: int
    seconds: float


class _InferenceEngine:
    """One server of an engine. ``push`` is for one thread."""

    kind = ""

    def __init__(
        self, url: str, name: Callable[[str], str] | None, headers: Mapping[str, str] | None, timeout: Duration
    ) -> None:
        self._url, user = without_user(url)
        self._url = self._url.rstrip("/")
        self._headers = {**user, **(headers or {})}
        self._name = name if name is not None else _without_component
        self._timeout_s = seconds_of(timeout, f"{type(self).__name__}(timeout=…)")
        self._has: tuple[str, str] | None = None
        """Id and version of the checkpoint that was pushed last; None if the engine's weights are unknown."""

    @short_traceback
    def push(self, follower: Follower, switched: Switched | None = None) -> Pushed | None:
        """Bring the engine to the follower's checkpoint. Return what was sent; None if the engine has that checkpoint already.

        Only the tensors that ``switched`` changed are sent, if the engine still has the checkpoint before. Otherwise all: at first, after
        a failed push, after a switch that was not pushed, and after a restart of the engine, which it reports by its weight version.
        Raise ``StoreUnavailable`` if the engine does not answer or refuses. The next push then sends all tensors.

        Args:
            follower: After its first switch.
            switched: What ``poll()`` or ``wait()`` returned. None: all tensors are sent.
        """
        checkpoint = follower.checkpoint
        if checkpoint is None:
            raise ConfigError("the follower has no checkpoint yet", where=self._url, hint="push after poll() or wait()")
        began = time.perf_counter()
        had, self._has = self._has, None
        if had is not None and self._version(had[1]) != had[1]:
            had = None
        if had is not None and had[0] == checkpoint.id:
            self._has = had
            return None
        known = had is not None and switched is not None and (switched.before, switched.id) == (had[0], checkpoint.id)
        changed = switched.changed if known and switched is not None else tuple(follower.tensors)
        weights = self._weights(follower, switched)
        names = tuple(map(self._name, changed))
        self._send(weights, names, checkpoint.step, checkpoint.id)
        self._has = checkpoint.id, str(checkpoint.step)
        sent = sum(weights[name].nbytes for name in names)
        pushed = Pushed(checkpoint.step, checkpoint.id, names, sent, time.perf_counter() - began)
        emit(
            "follow.pushed",
            f"{self.kind} at {url_shown(self._url)} has step {pushed.step}",
            engine=self.kind,
            url=url_shown(self._url),
            step=pushed.step,
            id=pushed.id,
            tensors=len(names),
            bytes=sent,
            seconds=round(pushed.seconds, 6),
        )
        return pushed

    def _weights(self, follower: Follower, switched: Switched | None) -> Weights:
        """Return all live tensors by the engine's names."""
        weights = {self._name(name): tensor for name, tensor in follower.tensors.items()}
        lacking = [name for name in (switched.changed if switched is not None else ()) if name not in follower.tensors]
        if not weights:
            raise ConfigError("the follower has no live tensors to send", where=self._url, hint="follow into a module")
        if lacking:
            raise ConfigError(
                f"{len(lacking)} live tensors cannot be sent, such as {lacking[0]}: sharded, or loaded by an object's own code",
                where=self._url,
                hint="follow into a plain module or engine_views of whole tensors",
            )
        if len(weights) < len(follower.tensors):
            raise ConfigError(
                "two stored tensors have one name in the engine",
                where=self._url,
                hint="check name=; follow one component",
            )
        return weights

    def _version(self, expected: str) -> str | None:
        """Return the weight version that the engine reports, or ``expected`` if it reports none."""
        raise NotImplementedError

    def _send(self, weights: Weights, changed: Sequence[str], step: int, checkpoint_id: str) -> None:
        """Give the engine the weights. It has all but the ``changed`` ones already."""
        raise NotImplementedError

    def _ask(self, path: str, body: object = None, *, get: bool = False) -> dict[str, Any]:
        """Return the answer to a request; empty for one that is not a JSON object. Raise ``StoreUnavailable``."""
        headers = dict(self._headers) if get else {**self._headers, "Content-Type": "application/json"}
        data = None if get else json.dumps(body).encode() if body is not None else b""
        where = f"{self._url}{path}"
        try:
            text = request(
                where,
                headers=headers,
                timeout_s=self._timeout_s,
                bytes_max=_ANSWER_BYTES_MAX,
                data=data,
                what=self.kind,
            )
        except RelightError as error:
            raise StoreUnavailable(error.what, where=error.where, hint=_AGAIN) from None
        try:
            answer = json.loads(text)
        except ValueError:
            return {}
        if isinstance(answer, dict) and answer.get("success") is False:
            message = str(answer.get("message", ""))[:200]
            raise StoreUnavailable(f"{self.kind} refused the weights: {message}", where=url_shown(where), hint=_AGAIN)
        return answer if isinstance(answer, dict) else {}


class SGLang(_InferenceEngine):
    """A server of SGLang. Without ``folder``, changed tensors are sent in requests; with it, the server reads files.

    Args:
        url: The server, such as ``http://localhost:30000``.
        tp_size: The server's ``--tp-size``: a request has one copy of the tensors for each rank.
        folder: A directory for this alone, which follower and server see under this path. The server reads all weights from it.
        pause: What happens to running requests: ``retract``, ``abort``, or ``in_place``.
        batch: The bytes of tensors in one request.
        name: The engine's name of a stored tensor. None: the stored name without its component.
        headers: For each request, such as ``{"Authorization": "Bearer …"}``.
        timeout: The longest wait for an answer.
    """

    kind = "SGLang"

    def __init__(
        self,
        url: str,
        *,
        tp_size: int = 1,
        folder: str | os.PathLike[str] | None = None,
        pause: str = "retract",
        batch: Size = "256MiB",
        name: Callable[[str], str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Duration = 600,
    ) -> None:
        super().__init__(url, name, headers, timeout)
        self._tp_size, self._pause, self._batch = tp_size, pause, bytes_of(batch, "SGLang(batch=…)")
        self._folder = None if folder is None else _WeightsFolder(folder)

    def _version(self, expected: str) -> str | None:
        return self._ask("/get_model_info", get=True).get("weight_version")

    def _send(self, weights: Weights, changed: Sequence[str], step: int, checkpoint_id: str) -> None:
        self._ask("/pause_generation", {"mode": self._pause})
        version = {"weight_version": str(step), "flush_cache": self._pause != "in_place"}
        if self._folder is not None:
            path = self._folder.write(weights, changed, checkpoint_id)
            self._ask("/update_weights_from_disk", {"model_path": str(path), **version})
        else:
            batches = [*_batches({name: weights[name] for name in changed}, self._batch)]
            for number, batch in enumerate(batches):
                last = version if number == len(batches) - 1 else {"flush_cache": False}
                tensors = [(name, tensor.detach().cpu().clone()) for name, tensor in batch.items()]
                payload = base64.b64encode(pickle.dumps(tensors, protocol=4)).decode()
                self._ask(
                    "/update_weights_from_tensor", {"serialized_named_tensors": [payload] * self._tp_size, **last}
                )
        self._ask("/continue_generation", {})


class VLLM(_InferenceEngine):
    """A server of vLLM, started with ``VLLM_SERVER_DEV_MODE=1``. It reads all weights from files.

    Args:
        url: The server, such as ``http://localhost:8000``.
        folder: A directory for this alone, which follower and server see under this path.
        pause: What happens to running requests: ``wait`` for their end, ``abort``, or ``keep``.
        version: Whether the server has ``/update_weight_version`` and ``/weight_info``. If not, a restarted server gets the
            weights at the next switch only.
        name: The engine's name of a stored tensor. None: the stored name without its component.
        headers: For each request, such as ``{"Authorization": "Bearer …"}``.
        timeout: The longest wait for an answer.
    """

    kind = "vLLM"

    def __init__(
        self,
        url: str,
        folder: str | os.PathLike[str],
        *,
        pause: str = "wait",
        version: bool = True,
        name: Callable[[str], str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Duration = 600,
    ) -> None:
        super().__init__(url, name, headers, timeout)
        self._folder, self._pause, self._versions = _WeightsFolder(folder), pause, version

    def _version(self, expected: str) -> str | None:
        return self._ask("/weight_info", get=True).get("weight_version") if self._versions else expected

    def _send(self, weights: Weights, changed: Sequence[str], step: int, checkpoint_id: str) -> None:
        path = self._folder.write(weights, changed, checkpoint_id)
        self._ask(f"/pause?mode={self._pause}")
        self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
        if self._versions:
            self._ask("/update_weight_version", {"new_version": str(step)})
        self._ask("/resume")


class _WeightsFolder:
    """Safetensors files for an engine, in two directories by turns. A file without changed tensors is linked, not written again."""

    shard_bytes = 256 << 20

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._root = Path(path).absolute()
        self._current: tuple[str, Path] | None = None
        """The checkpoint that was written last, and where. An engine that cannot load a newer one may read it again."""

    def write(self, weights: Weights, changed: Sequence[str], checkpoint_id: str) -> Path:
        """Return a directory with all weights."""
        if self._current is not None and self._current[0] == checkpoint_id:
            return self._current[1]
        before, touched = (self._current[1] if self._current is not None else None), set(changed)
        target = self._root / ("relight-1" if before is not None and before.name == "relight-0" else "relight-0")
        try:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for number, shard in enumerate(_batches(weights, self.shard_bytes)):
                file = f"model-{number + 1:05d}.safetensors"
                if before is None or not touched.isdisjoint(shard) or not _linked(before / file, target / file):
                    _write_safetensors(target / file, shard)
        except OSError as error:
            raise translate(error, "writing weights for an engine", str(target)) from error
        self._current = checkpoint_id, target
        return target


def _without_component(name: str) -> str:
    return name.partition("/")[2] or name


def _batches(weights: Weights, limit: int) -> Iterator[Weights]:
    """Yield the weights in their order, in batches of that many bytes, or of one tensor."""
    batch: Weights = {}
    size = 0
    for name, tensor in weights.items():
        if batch and size + tensor.nbytes > limit:
            yield batch
            batch, size = {}, 0
        batch[name] = tensor
        size += tensor.nbytes
    yield batch


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        return False
    return True


def _write_safetensors(path: Path, weights: Weights) -> None:
    """Write a file; widest elements first, so that each tensor is aligned to its element size."""
    ordered = sorted(weights.items(), key=lambda pair: -pair[1].element_size())
    header = [(name, dtype_name(tensor.dtype) or "", tensor.shape, tensor.nbytes) for name, tensor in ordered]
    with path.open("wb", buffering=0) as file:
        file.write(encode_header(header, {"format": "pt"}))
        for _, tensor in ordered:
            on_host = tensor.detach().cpu().contiguous()
            data = memory_of(on_host)
            assert data is not None
            while data:
                data = data[file.write(data) :]
