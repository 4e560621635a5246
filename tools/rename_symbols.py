"""Rename symbols in the whole tree, by a language server (basedpyright), so that types decide what is renamed.

    rename_symbols.py ROOT TABLE

Each line of TABLE: ``file  symbol  new``. ``symbol``: ``Class``, ``function``, ``Class.member``, ``function(parameter)``, ``Class.method(parameter)``.
``# …`` is a comment. A line whose symbol is missing is reported, and the others are done.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue
from urllib.parse import unquote, urlparse


class Server:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.process = subprocess.Popen(["nice", str(Path(sys.executable).parent / "basedpyright-langserver"), "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.number, self.replies = 0, Queue()
        threading.Thread(target=self._receive, daemon=True).start()
        self.request("initialize", {"processId": None, "rootUri": root.as_uri(), "workspaceFolders": [{"uri": root.as_uri(), "name": "r"}],
                                    "capabilities": {"workspace": {"workspaceEdit": {"documentChanges": True}, "configuration": True}}})
        self.notify("initialized", {})

    def _send(self, message: dict) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        self.process.stdin.flush()

    def _receive(self) -> None:
        out = self.process.stdout
        while True:
            length = 0
            while (line := out.readline().strip()):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            if not length:
                return
            message = json.loads(out.read(length))
            if "method" in message and "id" in message:
                if message["method"] == "workspace/configuration":
                    result = [{"analysis": {"diagnosticMode": "workspace", "typeCheckingMode": "off", "indexing": False}, "pythonPath": str(self.root / ".venv/bin/python")} for _ in message["params"]["items"]]
                else:
                    result = None
                self._send({"id": message["id"], "result": result})
            elif "id" in message:
                self.replies.put(message)

    def request(self, method: str, params: dict):
        self.number += 1
        self._send({"id": self.number, "method": method, "params": params})
        while True:
            reply = self.replies.get(timeout=600)
            if reply["id"] == self.number:
                return reply

    def notify(self, method: str, params: dict) -> None:
        self._send({"method": method, "params": params})


def position(source: str, symbol: str) -> tuple[int, int] | None:
    parameter = symbol.partition("(")[2].rstrip(")")
    names = symbol.partition("(")[0].split(".")
    nodes, node = ast.parse(source).body, None
    for name in names:
        node = next((n for body in [nodes] for n in walk(body) if defines(n, name)), None)
        if node is None:
            return None
        nodes = getattr(node, "body", [])
    lines = source.splitlines()
    if parameter:
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        node = next((a for a in every if a.arg == parameter), None)
        return (node.lineno - 1, utf16(lines[node.lineno - 1], node.col_offset)) if node else None
    name = names[-1]
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = lines[node.lineno - 1]
        return node.lineno - 1, text.index(name, node.col_offset + 3)
    target = node.target if isinstance(node, ast.AnnAssign) else next(t for t in flat(node.targets) if getattr(t, "id", getattr(t, "attr", "")) == name)
    end = target.end_col_offset - len(name.encode()) if isinstance(target, ast.Attribute) else target.col_offset
    return target.lineno - 1, utf16(lines[target.lineno - 1], end)


def utf16(line: str, offset: int) -> int:
    return len(line.encode()[:offset].decode().encode("utf-16-le")) // 2


def flat(targets):
    for target in targets:
        yield from flat(target.elts) if isinstance(target, ast.Tuple) else [target]


def walk(body):
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from walk(node.body)
    for node in body:  # attributes set in methods
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield from (n for n in ast.walk(node) if isinstance(n, (ast.Assign, ast.AnnAssign)))


def defines(node, name: str) -> bool:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return node.name == name
    targets = [node.target] if isinstance(node, ast.AnnAssign) else list(flat(node.targets)) if isinstance(node, ast.Assign) else []
    return any(getattr(t, "id", getattr(t, "attr", "")) == name for t in targets)


def apply(edits: dict[Path, list]) -> int:
    count = 0
    for path, changes in edits.items():
        lines = path.read_text(encoding="utf-8").split("\n")
        for change in sorted(changes, key=lambda c: (c["range"]["start"]["line"], c["range"]["start"]["character"]), reverse=True):
            start, end = change["range"]["start"], change["range"]["end"]
            assert start["line"] == end["line"]
            line = lines[start["line"]].encode("utf-16-le")
            lines[start["line"]] = (line[: 2 * start["character"]] + change["newText"].encode("utf-16-le") + line[2 * end["character"]:]).decode("utf-16-le")
            count += 1
        path.write_text("\n".join(lines), encoding="utf-8")
    return count


def main(root: Path, table: Path) -> int:
    server, missed = Server(root), 0
    opened: dict[Path, int] = {}
    import time; time.sleep(30)

    def sync(path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        if path not in opened:
            opened[path] = 1
            server.notify("textDocument/didOpen", {"textDocument": {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": text}})
        else:
            opened[path] += 1
            server.notify("textDocument/didChange", {"textDocument": {"uri": path.as_uri(), "version": opened[path]}, "contentChanges": [{"text": text}]})

    for line in table.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        file, symbol, new = line.split()
        path = root / file
        where = position(path.read_text(encoding="utf-8"), symbol) if path.exists() else None
        if where is None:
            print(f"MISSING {file} {symbol}")
            missed += 1
            continue
        sync(path)
        reply = server.request("textDocument/rename", {"textDocument": {"uri": path.as_uri()}, "position": {"line": where[0], "character": where[1]}, "newName": new})
        result = reply.get("result")
        if not result:
            print(f"REFUSED {file} {symbol}: {reply.get('error')}")
            missed += 1
            continue
        edits: dict[Path, list] = {}
        for change in result.get("documentChanges", []):
            edits.setdefault(Path(unquote(urlparse(change["textDocument"]["uri"]).path)), []).extend(change["edits"])
        for uri, changes in result.get("changes", {}).items():
            edits.setdefault(Path(unquote(urlparse(uri).path)), []).extend(changes)
        count = apply(edits)
        for changed in edits:
            sync(changed)
        print(f"{symbol} -> {new}: {count} places in {len(edits)} files", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2])))
