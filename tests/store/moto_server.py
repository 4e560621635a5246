"""moto as a server of its own, one request at a time: left to its threads, two of eight creations of one name at once may both succeed."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple


def main() -> None:
    """Listen at the port that is named, and at the address if one is."""
    moto, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        # a client that is slow to send keeps no other client waiting
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
        with lock:
            return [b"".join(moto(environ, start))]

    run_simple(sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1", int(sys.argv[1]), app, threaded=True)


if __name__ == "__main__":
    main()
