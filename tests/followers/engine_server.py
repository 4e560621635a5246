"""A stand-in for an engine's server: ``python engine_server.py sglang|vllm PORT TP_SIZE SHAPES``.

It implements the requests that SGLang and vLLM document for weight updates, and refuses everything else. ``SHAPES`` is a JSON file of
``{name: [dtype, shape]}``. Paths below ``/test`` are the test's: what the server has, which requests it got, and which it must fail.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file

DISK_FIELDS = {"model_path", "load_format", "abort_all_requests", "weight_version", "is_async", "torch_empty_cache",
               "keep_pause", "recapture_cuda_graph", "token_step", "flush_cache"}  # fmt: skip
TENSOR_FIELDS = {"serialized_named_tensors", "load_format", "flush_cache", "abort_all_requests", "weight_version"}
MODULES = ("builtins.", "collections.", "torch.")
"""Prefixes of modules that the engine's restricted unpickler admits, as far as tensors need them."""


class Refused(Exception):
    """A request that the engine would refuse, with its status."""


class Restricted(pickle.Unpickler):
    """Admits the modules that the engine's own unpickler admits."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function of an admitted module."""
        if not f"{module}.".startswith(MODULES):
            raise Refused(400, f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


class Engine:
    """The weights of each rank, as after a start from disk."""

    def __init__(self, tp_size: int, shapes: dict[str, tuple[str, list[int]]]) -> None:
        self.ranks = [
            {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in shapes.items()}
            for _ in range(tp_size)
        ]
        self.version, self.paused, self.flushed = "default", False, 0
        self.requests: list[Any] = []
        self.failing: dict[str, list[int]] = {}

    def load(self, rank: int, tensors: Any) -> list[str]:
        """Copy named tensors into a rank's weights."""
        if not self.paused:
            raise Refused(400, "weights are updated while requests run")
        loaded = []
        for name, tensor in tensors:
            own = self.ranks[rank].get(name)
            if own is None or own.shape != tensor.shape:
                raise Refused(400, f"no parameter {name} of {list(tensor.shape)}")
            own.copy_(tensor)
            loaded.append(name)
        return loaded

    def load_folder(self, path: str) -> list[str]:
        """Copy all tensors of a directory into each rank's weights."""
        files = sorted(Path(path).glob("*.safetensors"))
        tensors = [pair for file in files for pair in load_file(file).items()]
        if {name for name, _ in tensors} != self.ranks[0].keys():
            raise Refused(400, f"{path} has {len(tensors)} of {len(self.ranks[0])} weights")
        for rank in range(len(self.ranks)):
            self.load(rank, tensors)
        return [f"{file.name} {file.stat().st_nlink}" for file in files]

    def sums(self) -> dict[str, str]:
        """Return the SHA-256 of each weight; all ranks must have the same."""
        sums = [
            {
                name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
                for name, tensor in rank.items()
            }
            for rank in self.ranks
        ]
        assert all(each == sums[0] for each in sums)
        return sums[0]

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> Any:
        """Return the answer to a request."""
        raise NotImplementedError


class SGLang(Engine):
    """https://docs.sglang.io/advanced_features/sglang_for_rl.html and native_api."""

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> Any:
        """See ``Engine``."""
        if (method, path) == ("GET", "/get_model_info"):
            return {"model_path": "stand-in", "is_generation": True, "weight_version": self.version}
        if (method, path) == ("POST", "/pause_generation") and body["mode"] in ("abort", "retract", "in_place"):
            self.paused = True
            return {"message": "Generation paused successfully.", "status": "ok"}
        if (method, path) == ("POST", "/continue_generation") and isinstance(body, dict):
            self.paused = False
            return {"message": "Generation continued successfully.", "status": "ok"}
        if (method, path) == ("POST", "/update_weights_from_tensor") and body.keys() <= TENSOR_FIELDS:
            payloads = body["serialized_named_tensors"]
            for rank in range(len(self.ranks)):
                data = base64.b64decode(payloads[rank], validate=True)
                self.requests[-1] = [path, self.load(rank, Restricted(io.BytesIO(data)).load())]
        elif (method, path) == ("POST", "/update_weights_from_disk") and body.keys() <= DISK_FIELDS:
            self.requests[-1] = [path, self.load_folder(body["model_path"])]
        else:
            raise Refused(404, "Not Found")
        self.flushed += body.get("flush_cache", True)
        self.version = body.get("weight_version") or self.version
        return {"success": True, "message": "Success"}


class VLLM(Engine):
    """https://docs.vllm.ai/en/latest/training/async_rl/, features/sleep_mode/ and training/layerwise/, in development mode."""

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> Any:
        """See ``Engine``."""
        if (method, path) == ("GET", "/weight_info"):
            return {"weight_version": self.version}
        if (method, path) == ("POST", "/pause") and query["mode"][0] in ("abort", "wait", "keep"):
            self.paused, self.flushed = True, self.flushed + 1
            return {"status": "paused"}
        if (method, path) == ("POST", "/resume"):
            self.paused = False
            return {"status": "resumed"}
        if (method, path) == ("POST", "/update_weight_version"):
            self.version = body["new_version"]
            return {"success": True, "new_version": self.version}
        if (method, path) == ("POST", "/collective_rpc") and body["method"] == "reload_weights":
            self.requests[-1] = [path, self.load_folder(path=body["kwargs"].pop("weights_path"), **body["kwargs"])]
            return {"results": [None] * len(self.ranks)}
        raise Refused(404, "Not Found")


def main() -> None:
    """Serve until the process is killed."""
    kind, port, tp_size, shapes = sys.argv[1:]
    engine = {"sglang": SGLang, "vllm": VLLM}[kind](int(tp_size), json.loads(Path(shapes).read_text()))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.serve("GET")

        def do_POST(self) -> None:
            self.serve("POST")

        def serve(self, method: str) -> None:
            parts = urlsplit(self.path)
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(text) if text else None
            status, answer = 200, None
            if parts.path.startswith("/test/"):
                answer = self.of_the_test(parts.path, body)
            else:
                engine.requests.append(parts.path)
                failing = engine.failing.get(parts.path, [])
                try:
                    if failing and not failing.pop(0):
                        raise Refused(500, "Internal Server Error")
                    answer = engine.answer(method, parts.path, parse_qs(parts.query), body)
                except Refused as refused:
                    status, answer = refused.args[0], {"success": False, "message": refused.args[1]}
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def of_the_test(self, path: str, body: Any) -> Any:
            if path == "/test/state":
                requests, engine.requests = engine.requests, []
                return [engine.sums(), engine.version, engine.paused, requests, engine.flushed]
            engine.failing.update(body)
            return {}

        def log_message(self, *_: Any) -> None:
            pass

    HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


main()
