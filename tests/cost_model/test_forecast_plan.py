"""Plans and presets: bytes, times and choices from given inputs, and each preset's settings in a real training."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from relight.cost_model import Belief, prior
from relight.cost_model.planned import MeasuredTime, ParallelLayout, Question, fit, plan
from relight.cost_model.presets import SCENARIOS, WORSE, preset
from relight.cost_model.sizing import from_count, size_of
from relight.errors import ConfigError
from relight.keys import write_key_file
from relight.keys.signing import write_signing_key
from relight.policy.file_defaults import defaults_of
from relight.supervise.settings import read_settings
from relight.units import percent_text


def ask(model: str = "70B", **changes: object) -> Question:
    """Return questions about a model on 512 GPUs, with changes."""
    given: dict = {
        "size": size_of(from_count(model)),
        "layout": ParallelLayout(512),
        "belief": Belief(5, 5 * 43200.0),
        "rate_source": "given",
        **changes,
    }
    return Question(**given)


def test_the_optimum_of_a_plan_is_its_best_interval() -> None:
    """No other interval loses less, none is shorter than a save takes until durable, and the store alone loses more."""
    for model, gpus in (("8B", 64), ("70B", 512), ("405B", 16384), ("1T", 16384)):
        result = plan(ask(model, layout=ParallelLayout(gpus), belief=prior(gpus)))
        best_s, durable_s = result.best.seconds, result.sources[-1].has_after_s
        assert best_s >= durable_s
        for factor in (0.5, 0.8, 0.95, 1.05, 1.3, 2, 5):
            if best_s * factor >= durable_s:
                assert result.lost_at(best_s * factor) >= result.best.waste - 1e-9
        assert result.best.waste <= result.store_only.waste


def test_peers_do_not_have_a_save_before_the_store() -> None:
    """Peers get a save after its commit. They shorten restores, and do not make saves more frequent or safe earlier."""
    slow = {"store_write": 1e9, "store_read": 1e9}
    alone, protected = (
        plan(ask(paces=slow, belief=prior(512), levels=levels))
        for levels in (("memory", "store"), ("memory", "peers", "store"))
    )
    _, peers, store = protected.sources
    assert peers.has_after_s > store.has_after_s == pytest.approx(980, rel=0.01)
    assert peers.restart_s < store.restart_s - 900
    assert protected.best.seconds == alone.best.seconds >= store.has_after_s
    assert protected.costs.durable_s == pytest.approx(alone.costs.durable_s)
    assert protected.costs.restart_s == pytest.approx(alone.costs.restart_s - peers.share * 980, rel=0.01)


def test_peers_gain_nothing_where_a_restore_from_the_store_takes_as_long() -> None:
    """Goodput is the same with and without peers if both are read at the speed of a node's link."""
    paces = {"store_write": 1e9, "store_read": 1e15}
    alone, protected = (
        plan(ask(paces=paces, levels=levels)).goodput for levels in (("memory", "store"), ("memory", "peers", "store"))
    )
    assert protected == pytest.approx(alone, abs=1e-9)


def test_costs_of_nothing_give_an_interval() -> None:
    """Saves that take no time are a millisecond apart, so that rates and shares are finite."""
    free = MeasuredTime(0.0, 0.0, "given")
    assert plan(ask(measured={"stall": free, "durable": free})).best.seconds == pytest.approx(1e-3)


def test_times_follow_from_bytes_and_paces() -> None:
    """The stall is a GPU's share divided by the copy's rate. A save is durable when store and link are done. Given
    numbers are marked as given."""
    result = plan(ask(paces={"copy": 10e9, "store_write": 10e9, "store_read": 5e9}, start_s=100.0))
    share = 980e9 / 512
    assert result.costs.stall_s == pytest.approx(share / 10e9)
    assert result.sources[-1].has_after_s == pytest.approx(98 + share / 10e9)
    assert result.sources[-1].restart_s == pytest.approx(100 + 196)
    assert result.known["copy"].source == result.known["start"].source == "given"
    assert result.known["link"].source == "assumed"


def test_unsharded_state_is_read_by_every_replica() -> None:
    """With ZeRO 1, every group of tensor and pipeline ranks reads the weights again. With FSDP, all ranks read one
    checkpoint together."""
    size = size_of(from_count("70B"))
    assert plan(ask()).load_bytes == pytest.approx(size.bytes)
    weights = size.parts["weights"]
    again = plan(ask(layout=ParallelLayout(512, tensor=8, zero=1))).load_bytes
    assert again == pytest.approx(size.bytes - weights + 64 * weights)
    assert plan(ask(layout=ParallelLayout(512, tensor=8, zero=0))).load_bytes == pytest.approx(64 * size.bytes)


def test_measured_times_are_used_unchanged() -> None:
    """Measured costs are used, also if they are not proportional to bytes. The plan names their source."""
    measured = {
        "stall": MeasuredTime(0.1, 0.0, "bench"),
        "durable": MeasuredTime(1, 1e-9, "bench"),
        "load": MeasuredTime(0, 2e-9, "bench"),
    }
    result = plan(ask("1B", layout=ParallelLayout(1, 1), measured=measured, levels=("memory", "store")))
    assert result.costs.stall_s == 0.1
    assert result.sources[-1].has_after_s == pytest.approx(1 + 14)
    assert result.sources[-1].restart_s == pytest.approx(result.known["start"].value + 28)
    assert result.known["durable_s"].source == "bench"


def test_lines_through_what_was_measured() -> None:
    """Two sizes give a line, one size a line through zero. Neither coefficient is negative."""
    line = fit([(1e9, 1.5), (2e9, 2.5)], "x")
    assert line.seconds(4e9) == pytest.approx(4.5)
    assert fit([(1e9, 2.0)], "x").seconds(5e8) == pytest.approx(1.0)
    assert fit([(1e9, 1.0), (2e9, 3.0)], "x").fixed_s == 0.0
    assert fit([(1e9, 3.0), (2e9, 1.0)], "x").per_byte_s == 0.0
    with pytest.raises(ConfigError):
        fit([(0, 1.0)], "x")


def test_costs_and_memory() -> None:
    """A node has two snapshots, and as much again for peers. A month's cost is lost time and stored bytes times their
    prices."""
    result = plan(ask(gpu_hour=2.0, store_tb_month=20.0))
    assert result.host_bytes == pytest.approx(2 * 2 * 980e9 / 64)
    assert result.month["storage"] == pytest.approx(4 * 0.98 * 20)
    assert result.month["lost GPU time"] == pytest.approx(result.best.waste * 512 * 730.5 * 2)
    assert plan(ask()).month == {}


def test_a_question_that_makes_no_sense_is_refused() -> None:
    """Indivisible numbers of GPUs, unknown levels and plans without a persistent level are refused."""
    for wrong in ({"gpus": 10, "tensor": 4}, {"gpus": 0}, {"gpus": 8, "zero": 4}):
        with pytest.raises(ConfigError):
            ParallelLayout(**wrong)
    for levels in (("memory",), ("tape", "store"), ()):
        with pytest.raises(ConfigError, match="levels must be"):
            plan(ask(levels=levels))


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_preset_is_a_file_that_both_readers_take(name: str, tmp_path: Path) -> None:
    """The TOML validates, its values equal those of the plan's lines, its comments fit, and its bounds are
    consistent."""
    result = preset(name)
    values = tomllib.loads(result.toml())
    defaults = defaults_of(values["checkpoint"], "a preset")
    assert defaults.save is not None
    assert defaults.keep is not None
    (tmp_path / "relight.toml").write_text(result.toml())
    assert read_settings(tmp_path / "relight.toml").spares is values["supervise"]["spares"]
    for line in result.lines:
        table = values
        for part in line.table.split("."):
            table = table[part]
        assert table[line.key] == (list(line.value) if isinstance(line.value, tuple) else line.value)
    assert max(map(len, result.toml().splitlines())) <= 140


def test_a_preset_states_what_its_longest_interval_costs() -> None:
    """The comment has the loss at ``at_most`` itself, also where twice ``at_least`` is above the planned bound."""
    result = preset("large-model")
    line = next(line for line in result.lines if line.key == "at_most")
    lost = [result.plan.store_lost_at(seconds, WORSE) for seconds in (float(str(line.value)[:-1]), *range(30, 60))]
    assert f"costs {percent_text(lost[0] - min(lost))} more of the time" in line.why


def test_presets_differ_by_their_numbers() -> None:
    """More GPUs save more often, few resources set a limit, persistent levels keep months, and peers are used if they
    pay."""
    most = {
        name: float(next(line.value for line in preset(name).lines if line.key == "at_most")[:-1]) for name in SCENARIOS
    }  # type: ignore[index]
    assert most["small"] > most["medium"] > most["large"] > most["large-model"]
    assert most["high-performance"] < most["large"]
    keys = {name: {f"{line.table}.{line.key}" for line in preset(name).lines} for name in SCENARIOS}
    assert "checkpoint.limits.memory" in keys["resource-constrained"]
    assert "checkpoint.keep.monthly" in keys["enterprise"]
    assert "checkpoint.peers.copies" in keys["large-model"]
    assert "checkpoint.peers.copies" not in keys["medium"]
    for name in SCENARIOS:
        expected, snapshots = preset(name).plan, 4 if "checkpoint.peers.copies" in keys[name] else 2
        assert expected.host_bytes == pytest.approx(
            snapshots * expected.question.size.bytes / expected.question.layout.nodes
        )
    with pytest.raises(ConfigError, match="no preset"):
        preset("tiny")


def test_a_preset_keeps_its_own_limits_and_no_failure_takes_a_day() -> None:
    """The memory that a file expects is what it allows, and the longest interval is four hours at most."""
    for name in SCENARIOS:
        result = preset(name)
        values = {f"{line.table}.{line.key}": line.value for line in result.lines}
        assert float(str(values["checkpoint.adaptive.at_most"])[:-1]) <= 4 * 3600
        limit = values.get("checkpoint.limits.memory")
        assert limit is None or result.memory_bytes <= float(limit)  # type: ignore[arg-type]
    assert "14.7 GB of each node's memory" in preset("resource-constrained").toml()


def test_enterprise_has_what_an_enterprise_asks_for() -> None:
    """The production preset has encryption, signing, audit, alerts, a further tier and peers, with the preparations."""
    result = preset("enterprise", copies="s3://ours/runs", keys="/keys")
    values = {f"{line.table}.{line.key}": line.value for line in result.lines}
    assert (
        values["environment.key"] == "file:/keys/store.key"
        and values["environment.sign"] == "ed25519:file:/keys/signing.key"
    )
    assert (
        values["checkpoint.tiers.cold.url"] == "s3://ours/runs"
        and values["environment.audit"] == "s3://ours/runs-audit"
    )
    assert values["checkpoint.peers.copies"] == 1 and values["alerts.to"]
    assert any("relight keys new" in step for step in result.first) and "RELIGHT_SETTINGS" in result.toml()


TRAINING = """
import sys, torch, relight
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
with relight.Checkpointer("runs/demo", model=model, optimizer=optimizer, background=False) as ckpt:
    for step in range(ckpt.restore(), int(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        ckpt.step(step)
"""


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_preset_trains_and_resumes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real script next to the file uses its schedule and retention, logs this, and resumes from its end."""
    import sys

    from relight import open as open_store
    from relight.observe import Event, subscribe

    monkeypatch.chdir(tmp_path)
    write_key_file(str(tmp_path / "store.key"))
    write_signing_key(str(tmp_path / "signing.key"))
    (tmp_path / "relight.toml").write_text(preset(name, copies=str(tmp_path / "copies"), keys=str(tmp_path)).toml())
    monkeypatch.setenv("RELIGHT_SETTINGS", str(tmp_path / "relight.toml"))
    events: list[Event] = []
    undo = subscribe(events.append)
    try:
        for steps in (3, 6):
            monkeypatch.setattr(sys, "argv", ["train.py", str(steps)])
            exec(compile(TRAINING, "train.py", "exec"), {"__name__": "__main__"})
    finally:
        undo()
    assert [checkpoint.step for checkpoint in open_store("runs").checkpoints("demo")] == [2, 5]
    assert any(
        "save" in event.fields["names"] and "keep" in event.fields["names"]
        for event in events
        if event.name == "settings.read"
    )
    changed = [event for event in events if event.name == "schedule.changed"]
    assert [event.fields["step"] for event in changed] == [0, 3]
    assert "failure" in changed[0].fields["reason"]
