"""Steps and metrics of every number type, and faults in Relight's code that must not be reported as store failures."""

from __future__ import annotations

import operator
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relight
from relight.agent import slot_writer
from relight.checkpointer import background
from relight.commit import save as commit_save
from relight.errors import ConfigError, InternalError, RelightError, SaveFailed, known
from relight.format.names import STEP_MAX
from relight.observe import Event, subscribe


class Count:
    """A custom integer type."""

    def __index__(self) -> int:
        return 3


class Unshowable:
    """An object with a failing ``repr``."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


GOOD: list[Any] = [
    3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32), torch.tensor([3]), Count(),
    torch.nn.Parameter(torch.tensor(3), requires_grad=False),
]  # fmt: skip
BAD: list[Any] = [
    3.0, np.float64(3), "3", b"3", None, True, np.bool_(True), torch.tensor(True), torch.tensor(3.0), torch.tensor([1, 2]), np.array([3]),
    -1, np.int64(-1), STEP_MAX + 1, 10**5000, [3], {}, Decimal(3), Fraction(3), 3 + 0j, Unshowable(), Path("3"),
]  # fmt: skip


@pytest.fixture
def ckpt(tmp_path: Path) -> relight.Checkpointer:
    return relight.Checkpointer(
        tmp_path / "store" / "run", save=None, model=torch.nn.Linear(2, 2), signals=False, background=False
    )


@pytest.mark.parametrize("step", GOOD, ids=lambda value: type(value).__name__)
def test_a_step_is_whatever_has_an_index(ckpt: relight.Checkpointer, step: Any) -> None:
    """Accept counters of NumPy and torch as steps. Every call converts them to int."""
    with ckpt:
        ckpt.step(step, micro_step=step, loss=1.0)
        ckpt.save(step, micro_step=step)
        assert not ckpt.should_skip(step)
        ckpt.save(step)
        assert ckpt.restore(step) == 4
    url = ckpt.store_urls[0] + "/run"
    for saved_step in (
        relight.open(url).checkpoints()[-1].step,
        relight.save(url, {"w": torch.ones(1)}, step=step).step,
    ):
        assert saved_step == 3 and type(saved_step) is int
    assert "w" in relight.load(url, step)
    relight.open(url).tag("good", step)


@pytest.mark.parametrize("step", BAD, ids=lambda value: type(value).__name__)
def test_anything_else_is_refused_at_once(ckpt: relight.Checkpointer, step: Any) -> None:
    """Raise ConfigError with a hint at the call for a float, a text, a bool or a negative number. It never becomes a
    failed save."""
    calls: list[Callable[[], Any]] = [
        lambda: ckpt.step(step), lambda: ckpt.save(step), lambda: ckpt.should_skip(step),
        lambda: relight.save(ckpt.store_urls[0] + "/other", {"w": torch.ones(1)}, step=step),
    ]  # fmt: skip
    if step is not None:
        calls += [lambda: ckpt.step(3, micro_step=step), lambda: ckpt.save(3, micro_step=step)]
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.hint
        assert "step" in caught.value.where
    ckpt.close()
    assert not Path(ckpt.store_urls[0]).exists() or not relight.open(ckpt.store_urls[0]).runs


@pytest.mark.parametrize(
    "value",
    [1, 1.5, True, float("nan"), np.float32(1), np.int8(1), np.bool_(True), np.array(1.0), torch.tensor(1), torch.tensor(1.0), torch.tensor([1.0]),
     torch.tensor(1.0, requires_grad=True), torch.tensor(True), Decimal("1.5"), Fraction(1, 2)],
    ids=lambda value: f"{type(value).__name__}-{value}",
)  # fmt: skip
def test_numbers_are_metrics(ckpt: relight.Checkpointer, value: Any) -> None:
    """Accept every kind of number as a metric, and store it as a float."""
    with ckpt:
        ckpt.step(0, loss=value)
        assert ckpt.save(1, metrics={"loss": value})
    stored = relight.open(ckpt.store_urls[0] + "/run").checkpoints()[-1].body.metrics["loss"]
    plain = float(value.detach() if isinstance(value, torch.Tensor) else value)
    assert float(stored) == plain or plain != plain


@pytest.mark.parametrize(
    "value",
    ["0.5", b"1", None, [1.0], {}, torch.ones(2), torch.empty(0), torch.tensor(1j), torch.empty((), device="meta"), np.ones(2), np.str_("x"),
     np.complex64(1), 1j, 10**400, object(), Unshowable()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_an_invalid_metric_is_refused_by_its_name(ckpt: relight.Checkpointer, value: Any) -> None:
    """Refuse a metric that no save could store at ``step()``, not hours later at the save that reads it."""
    calls: list[Callable[[], Any]] = [
        lambda: ckpt.step(0, val=value), lambda: ckpt.save(0, metrics={"val": value}),
        lambda: relight.save(ckpt.store_urls[0] + "/other", {"w": torch.ones(1)}, step=1, metrics={"val": value}),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ConfigError, match="'val'"):
            call()
    with pytest.raises(ConfigError, match="metrics= must be a dict"):
        ckpt.save(0, metrics=[1.0])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="name must be a text"):
        ckpt.save(0, metrics={1: 1.0})  # type: ignore[dict-item]
    ckpt.close()


@pytest.mark.parametrize(
    "options",
    [{"tag": 7}, {"tag": np.int64(7)}, {"tag": ["a"]}, {"reason": 3}, {"reason": "a\nb"}, {"reason": "a\ud800"}],
    ids=str,
)
def test_a_tag_and_a_reason_are_texts(ckpt: relight.Checkpointer, options: dict[str, Any]) -> None:
    """Refuse a tag or reason that a record cannot store before the save begins."""
    with pytest.raises(ConfigError):
        ckpt.save(0, **options)
    ckpt.close()


def failures_during(call: Callable[[], Any]) -> list[Event]:
    """Return the failed saves that were reported during a call."""
    events: list[Event] = []
    undo = subscribe(events.append)
    try:
        call()
    finally:
        undo()
    return [event for event in events if event.name == "save.failed"]


@pytest.mark.parametrize(
    "fault", [TypeError, AttributeError, AssertionError, KeyError, IndexError, NameError, ValueError, ZeroDivisionError]
)
def test_a_fault_in_our_code_is_named_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: type[Exception]
) -> None:
    """Report the fault with its traceback, do not retry, and continue training. The next save is made."""
    calls: list[int] = []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        namespace: dict[str, Any] = {"fault": fault}
        # a frame of that file
        exec(compile("def inside():\n    raise fault('planted')", commit_save.__file__, "exec"), namespace)
        return namespace["inside"]()

    model = torch.nn.Linear(2, 2)
    with relight.Checkpointer(
        tmp_path / "run", save=None, model=model, on_failure="retry", signals=False, background=False
    ) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(commit_save, "encode_root", fails)
            failures = failures_during(lambda: ckpt.save(0))
        assert ckpt.save(1)
    assert len(calls) == 1, "a fault in code is not retried"
    assert [event.fields["kind"] for event in failures] == ["internal"]
    text = caplog.text
    assert (
        "internal error in Relight" in text
        and fault.__name__ in text
        and "commit/save.py" in text
        and "report this traceback" in text
    )
    assert "trying again" not in text
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "run").checkpoints()] == [1]


def test_a_store_that_fails_is_still_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry errors of a store as ``on_failure`` specifies."""
    calls: list[int] = []
    real = commit_save.encode_root

    def once(root: Any) -> bytes:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(5, "planted")
        return real(root)

    monkeypatch.setattr(commit_save, "encode_root", once)
    with relight.Checkpointer(
        tmp_path / "run", save=None, model=torch.nn.Linear(2, 2), on_failure="retry", background=False
    ) as ckpt:
        failures = failures_during(lambda: ckpt.save(0))
    assert len(calls) >= 2 and [event.fields["kind"] for event in failures] == ["save_failed"]


def test_a_caller_that_asked_to_stop_is_stopped_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the ``InternalError`` itself with ``on_failure="raise"``: the store did not fail, and yet there is no
    checkpoint."""
    monkeypatch.setattr(commit_save, "encode_root", lambda root: int(None))  # type: ignore[call-overload]
    ckpt = relight.Checkpointer(
        tmp_path / "run", save=None, model=torch.nn.Linear(2, 2), on_failure="raise", background=False, signals=False
    )
    with pytest.raises(SaveFailed) as foreign:
        ckpt.save(0)
    cause = foreign.value.__cause__
    assert isinstance(cause, SaveFailed) and not cause.retryable and Path(__file__).name in cause.what, (
        "a fault of other code names its line"
    )
    monkeypatch.setattr(commit_save, "encode_root", type("Encoder", (), {"__call__": staticmethod(operator.index)})())
    with pytest.raises(InternalError, match="TypeError"):
        ckpt.save(1)
    ckpt.close(save=False)


def test_a_fault_in_the_agent_keeps_its_kind_and_traceback(tmp_path: Path) -> None:
    """Return a code fault in the agent to the trainer as ``InternalError`` with the same lines."""
    try:
        slot_writer._failed(1, "x", 3)  # type: ignore[arg-type] # no error has such a type
    except AttributeError as error:
        report = slot_writer._failed(1, "x", error)
    kind, what, _, hint, retryable, details = report.error or ("", "", "", "", True, [])
    assert (kind, retryable) == ("internal", False) and "AttributeError" in what and "traceback" in hint
    assert any("errors.py" in line for line in details)


def test_errors_of_the_machine_are_no_faults() -> None:
    """Report a certificate error, which is a ``ValueError`` too, and a library's RuntimeError as failures of the
    machine. Return Relight's own errors unchanged."""
    import ssl

    assert isinstance(known(ssl.SSLCertVerificationError(1, "expired")), SaveFailed)
    assert known(RuntimeError("CUDA error")).retryable
    kept: RelightError = ConfigError("x")
    assert known(kept) is kept


def test_a_fault_on_the_way_to_the_agent_is_named_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Raise InternalError for a background save that fails in the trainer before the agent has it. Training
    continues."""
    with relight.Checkpointer(
        tmp_path / "run", save=None, model=torch.nn.Linear(2, 2), on_failure="retry", signals=False, background=True
    ) as ckpt:
        ckpt.save(0)
        with monkeypatch.context() as patch:
            patch.setattr(background, "encode_tree", type("Encoder", (), {"__call__": staticmethod(operator.index)})())
            failed = ckpt.save(1)
        assert isinstance(failed.error, InternalError) and "checkpointer/background.py" in str(failed.error)
        assert "trying again" not in caplog.text
        assert ckpt.save(2)
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "run").checkpoints()] == [0, 2]
