"""A stand-in for the Hugging Face Hub, with the requests of ``huggingface_hub`` that an upload and a download make."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class HubState:
    """Repositories: branches, and commits with the files of each."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}
        """Large files, by SHA-256."""
        self.token = "hf_secret"
        self.refuses_uploads = self.flips = False

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a branch or commit."""
        repository = self.repos[repo]
        return dict(repository["commits"][repository["branches"].get(revision, revision)])


def handler_for(state: HubState) -> type[BaseHTTPRequestHandler]:
    """Return a request handler."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _answer(self, status: int, body: Any = None, **headers: str) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            if "Content_Length" not in headers:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def _missing(self, what: str) -> None:
            self._answer(404, {"error": what}, X_Error_Code="RepoNotFound" if what == "repo" else "RevisionNotFound")

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _may_write(self) -> bool:
            if self.headers.get("Authorization") == f"Bearer {state.token}" and not state.refuses_uploads:
                return True
            self._answer(403, {"error": "this token may not write"})
            return False

        def do_POST(self) -> None:
            path, body = unquote(urlsplit(self.path).path), self._body()
            if not self._may_write():
                return
            if path == "/api/validate-yaml":
                self._answer(200, {"errors": [], "warnings": []})
            elif path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
                url = {"url": f"http://{self.headers['Host']}/{name}"}
                if name in state.repos:
                    self._answer(409, url)
                    return
                state.repos[name] = {
                    "private": asked.get("private", asked.get("visibility") == "private"),
                    "branches": {"main": "0" * 40},
                    "commits": {"0" * 40: {}},
                }
                self._answer(200, url)
            elif match := re.fullmatch(r"/api/models/(.+)/preupload/(.+)", path):
                files = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(body)["files"]
                ]
                self._answer(200, {"files": files})
            elif path.endswith(".git/info/lfs/objects/batch"):
                objects = []
                for large in json.loads(body)["objects"]:
                    upload = {"upload": {"href": f"http://{self.headers['Host']}/upload/{large['oid']}", "header": {}}}
                    objects.append({**large, **({} if large["oid"] in state.objects else {"actions": upload})})
                self._answer(200, {"transfer": "basic", "objects": objects})
            elif match := re.fullmatch(r"/api/models/(.+)/commit/(.+)", path):
                self._commit(match[1], match[2], body)
            elif match := re.fullmatch(r"/api/models/(.+)/branch/(.+)", path):
                repository = state.repos[match[1]]
                repository["branches"][match[2]] = repository["branches"]["main"]
                self._answer(200, {})
            elif match := re.fullmatch(r"/api/models/(.+)/paths-info/(.+)", path):
                asked = (
                    json.loads(body)["paths"]
                    if body.startswith(b"{")
                    else re.findall(r"paths=([^&]+)", unquote(body.decode()))
                )
                files = state.files(match[1], match[2])
                self._answer(200, [self._info(name, files[name]) for name in asked if name in files])
            else:
                self._answer(404, {"error": path})

        def _info(self, name: str, data: bytes) -> dict[str, Any]:
            digest = hashlib.sha256(data).hexdigest()
            lfs = (
                {"lfs": {"oid": digest, "size": len(data), "pointerSize": 130}} if name.endswith(".safetensors") else {}
            )
            return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest(), **lfs}

        def _commit(self, repo: str, branch: str, body: bytes) -> None:
            repository = state.repos[repo]
            files = state.files(repo, branch)
            for line in body.splitlines():
                item = json.loads(line)
                value = item["value"]
                if item["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif item["key"] == "lfsFile":
                    data = state.objects[value["oid"]]
                    files[value["path"]] = data[:-1] + b"?" if state.flips else data
                elif item["key"] == "deletedFile":
                    del files[value["path"]]
            commit = hashlib.sha1(b"%d" % len(repository["commits"])).hexdigest()
            repository["commits"][commit], repository["branches"][branch] = files, commit
            self._answer(
                200,
                {
                    "commitUrl": f"http://{self.headers['Host']}/{repo}/commit/{commit}",
                    "commitOid": commit,
                    "success": True,
                },
            )

        def do_PUT(self) -> None:
            data = self._body()
            state.objects[hashlib.sha256(data).hexdigest()] = data
            self._answer(200, {})

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                if match[1] not in state.repos:
                    self._missing("repo")
                    return
                repository, revision = state.repos[match[1]], match[2] or "main"
                commit = repository["branches"].get(revision, revision)
                if commit not in repository["commits"]:
                    self._missing("revision")
                    return
                siblings = [{"rfilename": name} for name in repository["commits"][commit]]
                self._answer(
                    200,
                    {
                        "id": match[1],
                        "modelId": match[1],
                        "sha": commit,
                        "private": repository["private"],
                        "siblings": siblings,
                        "tags": [],
                        "downloads": 0,
                        "likes": 0,
                    },
                )
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?(.*)", path):
                files = state.files(match[1], match[2])
                self._answer(200, [self._info(name, data) for name, data in files.items()])
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                repository = state.repos[match[1]]
                commit = repository["branches"].get(match[2], match[2])
                data = state.files(match[1], match[2]).get(match[3])
                if data is None:
                    self._answer(404, {"error": "entry"}, X_Error_Code="EntryNotFound")
                    return
                digest = hashlib.sha256(data).hexdigest()
                self._answer(200, data, X_Repo_Commit=commit, ETag=f'"{digest}"', Content_Length=str(len(data)))
            else:
                self._answer(404, {"error": path})

    return Handler


@contextmanager
def hub() -> Iterator[tuple[HubState, str]]:
    """Yield a hub and its URL."""
    state = HubState()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_for(state))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield state, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
