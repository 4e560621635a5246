"""What a save tells its caller."""

from __future__ import annotations

from relight.errors import ConfigError, RelightError


class Save:
    """One save: asked for, sealed (its values can no longer change), durable.

    In this version a save is durable, or has failed, by the time the caller holds it; the handle is the same for saves that are not.
    """

    def __init__(self, step: int, reason: str) -> None:
        self.step = step
        self.reason = reason
        self.id: str | None = None
        self.error: RelightError | None = None
        self.sealed = False
        self.done = False
        self.bytes = 0
        self.timings: dict[str, float] = {}

    def __repr__(self) -> str:
        state = "durable" if self.done else f"failed: {self.error.what}" if self.error else "running"
        return f"<Save step={self.step} id={self.id} {state}>"

    def __bool__(self) -> bool:
        return self.error is None

    def wait(self, timeout: float | None = None, until: str = "durable") -> Save:
        """Wait until the save is ``sealed``, ``durable`` or ``drained`` (with one store the same as durable); raise its error if it failed.

        ``timeout`` is in seconds; in this version there is never anything left to wait for.
        """
        if until not in ("sealed", "durable", "drained"):
            raise ConfigError(f"until is 'sealed', 'durable' or 'drained', not {until!r}")
        if self.error is not None:
            raise self.error
        return self
