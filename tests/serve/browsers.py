"""A real browser over servers of the pages, for tests. It needs Chromium and playwright: ``make pages`` has both."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import uvicorn
from tests.serve.made_app import application

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build" / "shots"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
AXE = Path(os.environ.get("AXE", ROOT / "build" / "axe" / "node_modules" / "axe-core" / "axe.min.js"))
VIEWS = [(390, "light"), (390, "dark"), (1400, "light"), (1400, "dark")]
PAGES = {
    "runs": "/", "run": "/runs/main/gpt2-small", "log": "/runs/main/gpt2-small/log", "checkpoint": "/runs/main/gpt2-small/checkpoints/000000abc003",
    "tensor": "/runs/main/gpt2-small/checkpoints/000000abc003?tensor=model/wte.weight", "compare": "/compare?a=gpt2-small@step%3D9000&b=gpt2-small@latest",
    "charts": "/charts?run=main/gpt2-small&run=main/vit", "lineage": "/lineage", "api": "/api", "storage": "/storage", "incidents": "/incidents", "incident": "/incidents/main/gpt2-small/6b1070", "risk": "/risk", "audit": "/audit",
    "settings": "/settings", "task": "/tasks/done", "task under way": "/tasks/going",
}  # fmt: skip


class Site:
    """A server of the pages on loopback."""

    def __init__(self, index: Any = None, app: Any = None) -> None:
        self.app = app or application(index)
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)


class Tab:
    """A browser page that records its messages and requests."""

    def __init__(self, browser: Any, width: int = 1400, scheme: str = "light", scripts: bool = True) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            java_script_enabled=scripts,
            reduced_motion="reduce",
        )
        self.page = self.context.new_page()
        self.messages: list[str] = []
        self.asked: list[str] = []
        self.page.on(
            "console",
            lambda message: self.messages.append(message.text) if message.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.messages.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def go(self, address: str) -> Any:
        """Load a page completely, and return it."""
        answer = self.page.goto(address, wait_until="load")
        assert answer.status == 200, address
        self.page.wait_for_timeout(150)
        return self.page

    def axe(self) -> list[str]:
        """Return serious findings of the accessibility scan, which runs outside the page's policy."""
        tools = self.context.new_cdp_session(self.page)
        asked = "; axe.run(document, {resultTypes: ['violations']}).then(found => JSON.stringify(found.violations))"
        answer = tools.send(
            "Runtime.evaluate", {"expression": AXE.read_text() + asked, "awaitPromise": True, "returnByValue": True}
        )
        violations = json.loads(answer["result"]["value"])
        return [
            f"{violation['id']}: {violation['nodes'][0]['html'][:200]}"
            for violation in violations
            if violation["impact"] in ("serious", "critical")
        ]
