"""Tracebacks of Relight's errors end at the public call; RELIGHT_DEBUG=1 shows all of them."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import relight
from relight.errors import InternalError
from relight.settings.short_traceback import short_traceback


def _lines(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


@pytest.fixture
def ckpt(tmp_path: Path) -> relight.Checkpointer:
    """A Checkpointer that saves on request."""
    model = torch.nn.Linear(2, 2)
    return relight.Checkpointer(tmp_path / "run", model=model, save=None, background=False, signals=False)


CALLS: dict[str, Callable[[relight.Checkpointer], object]] = {
    "load": lambda ckpt: relight.load("/nowhere/run"),
    "open": lambda ckpt: relight.open("/nowhere/run"),
    "save": lambda ckpt: relight.save("/nowhere/run", {}, step=-1),
    "keep": lambda ckpt: relight.keep(within="soon"),
    "every": lambda ckpt: relight.every("soon"),
    "adaptive": lambda ckpt: relight.adaptive(at_least="soon"),
    "best": lambda ckpt: relight.best("unknown"),
    "tier": lambda ckpt: relight.tier(""),
    "Tiers": lambda ckpt: relight.Tiers(),
    "Peers": lambda ckpt: relight.Peers(),
    "Limits": lambda ckpt: relight.Limits(memory="much"),
    "Compact": lambda ckpt: relight.Compact(level=99),
    "failure_policy": lambda ckpt: relight.failure_policy(retries=-1),
    "Checkpointer": lambda ckpt: relight.Checkpointer("x", model=None, limits=3),  # type: ignore[arg-type]
    "ckpt.step": lambda ckpt: ckpt.step(-1),
    "ckpt.save": lambda ckpt: ckpt.save(0, metrics=3),  # type: ignore[arg-type]
    "ckpt.restore": lambda ckpt: ckpt.restore("nothing"),
    "ckpt[name]": lambda ckpt: ckpt.__setitem__("nothing", 3),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_traceback_has_the_callers_line_and_one_of_relight(ckpt: relight.Checkpointer, call: str) -> None:
    """Below the caller's frames there is one frame."""
    with pytest.raises(relight.RelightError) as raised:
        CALLS[call](ckpt)
    *callers, last = [line for line in _lines(raised.value) if line != "<string>"]  # a dataclass's own __init__
    assert callers == [__file__, __file__] and last != __file__
    assert raised.value.__context__ is None or raised.value.__cause__ is not None


def test_everything_is_shown_on_request(ckpt: relight.Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """``RELIGHT_DEBUG=1`` leaves tracebacks whole."""
    monkeypatch.setenv("RELIGHT_DEBUG", "1")
    with pytest.raises(relight.ConfigError) as raised:
        ckpt.step(-1)
    assert len(_lines(raised.value)) > 3


def test_causes_keep_their_lines_outside_of_relight() -> None:
    """The cause stays, with the user's own lines; of a cause raised in Relight the raising line stays."""
    own = compile(
        "def inner(call):\n  try:\n    call()\n  except KeyError as error:\n    raise E('outer') from error\n",
        relight.errors.__file__,
        "exec",
    )
    names: dict[str, object] = {"E": relight.SaveFailed}
    exec(own, names)

    def component() -> None:
        raise KeyError("mine")

    with pytest.raises(relight.SaveFailed) as raised:
        short_traceback(names["inner"])(component)  # type: ignore[arg-type]
    cause = raised.value.__cause__
    assert isinstance(cause, KeyError) and _lines(cause) == [__file__]


def test_lines_of_the_scripts_own_trigger_stay(tmp_path: Path) -> None:
    """If Relight calls the script's code and that raises an error of Relight, the script's lines are shown."""

    class Wrong(relight.Trigger):
        """A trigger with a mistake."""

        def due(self, facts: relight.TriggerInput) -> str | None:
            raise relight.ConfigError("mine")

    ckpt = relight.Checkpointer(
        tmp_path / "run", model=torch.nn.Linear(2, 2), save=Wrong(), background=False, signals=False
    )
    with pytest.raises(relight.ConfigError, match="mine") as raised:
        ckpt.step(0)
    lines = traceback.extract_tb(raised.value.__traceback__)
    assert [line.name for line in lines] == ["test_lines_of_the_scripts_own_trigger_stay", "step", "due"]


def test_the_callers_own_error_is_still_the_context() -> None:
    """If a call fails while the caller handles another error, Python shows both."""
    try:
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            relight.keep(within="soon")
    except relight.ConfigError as error:
        assert isinstance(error.__context__, ZeroDivisionError) and not error.__suppress_context__


def test_faults_in_relight_are_shown_whole() -> None:
    """``InternalError`` is reported with its traceback, so that nothing is cut off."""

    def deep() -> None:
        raise InternalError("fault")

    with pytest.raises(InternalError) as raised:
        short_traceback(lambda: deep())()
    assert len(_lines(raised.value)) > 3


def test_errors_and_functions_are_otherwise_as_before() -> None:
    """Errors are pickled and copied, and functions keep name, signature and docstring."""
    with pytest.raises(relight.ConfigError) as raised:
        relight.keep(within="soon")
    for other in (pickle.loads(pickle.dumps(raised.value)), copy.copy(raised.value)):
        assert (str(other), type(other)) == (str(raised.value), relight.ConfigError)
    assert pickle.loads(pickle.dumps(relight.keep)) is relight.keep and relight.load.__name__ == "load"
