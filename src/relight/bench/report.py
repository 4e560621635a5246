"""Result of a bench, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relight.bench.advice import Advice
from relight.bench.figures import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Figures for a state of ``state_bytes`` in ``tensors`` tensors (None without torch), notes about them, and recommended settings.

    ``pace``: number of threads, and bytes per second at which they hash and write.
    """

    store: str
    state_bytes: int
    tensors: int | None
    rounds: int
    machine: Mapping[str, object]
    floors: tuple[Figure, ...]
    relight: tuple[Figure, ...]
    pace: tuple[tuple[int, float], ...]
    notes: tuple[str, ...]
    advice: Advice

    def to_dict(self) -> dict[str, Any]:
        """Return the value of ``--json``."""
        return {
            "store": self.store,
            "state_bytes": self.state_bytes,
            "tensors": self.tensors,
            "rounds": self.rounds,
            "machine": dict(self.machine),
            "floors": [_figure(figure) for figure in self.floors],
            "relight": [
                {**_figure(figure), "floor": list(figure.floor), "ratio": figure.ratio} for figure in self.relight
            ],
            "pace": [{"threads": threads, "bytes_per_second": pace} for threads, pace in self.pace],
            "notes": list(self.notes),
            "settings": [figure._asdict() for figure in self.advice.settings],
            "line": self.advice.line,
        }


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.name,
        "what": figure.label,
        "seconds": figure.seconds,
        "bytes_per_second": figure.bytes_per_second,
        "seconds_each": list(figure.rounds),
    }
