"""Capture of the process's own state: generators, swapped weights, the environment."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from roundtrip import load, restore, save
from torch import nn

import relight.capture as room
from relight.capture import Swap, capture, differences, environment, environment_soon
from relight.errors import RelightError


def draw() -> tuple:
    """Return numbers from each host generator. Normals are drawn too, because they are generated in pairs."""
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.randn()),
        np.random.permutation(5).tolist(),
        torch.randn(3).tolist(),
    )


def test_host_generators_continue_their_sequences() -> None:
    """Continue Python's, NumPy's and torch's generators by default as in the uninterrupted run."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    draw()
    stored = save({})
    expected = [draw() for _ in range(3)]
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    restore(stored, {})
    assert [draw() for _ in range(3)] == expected
    assert stored.kinds["rng"] == "rng" and all(tensor.role == "rng" for tensor in stored.tensors)


def test_generators_are_left_alone_when_not_asked_for() -> None:
    """Save no generators with ``rng=False``. A restore without them changes none."""
    stored = save({"n": 1}, rng=False)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    restore(stored, {"n": 0})
    assert torch.equal(before, torch.get_rng_state()) and stored.kinds == {"n": "value"}


def test_generators_come_last() -> None:
    """Restore generators after everything else, so that draws during the restore do not change them."""

    class Greedy:
        def state_dict(self) -> dict:
            return {"a": 1}

        def load_state_dict(self, state: dict) -> None:
            draw()

    torch.manual_seed(1)
    stored = save({"g": Greedy()})
    expected = draw()
    restore(stored, {"g": Greedy()})
    assert draw() == expected


def test_accelerators_this_machine_lacks_are_noted() -> None:
    """Restore a checkpoint from another machine, and report which generators could not be restored."""
    from relight.format import encode_tree

    stored = save({})
    from dataclasses import replace

    tree = capture({}).tree
    index = tree["rng"]["torch"]
    tree["rng"]["cuda"] = [index, index]
    plan = restore(replace(stored, tree=encode_tree(tree)), {})
    assert torch.cuda.is_available() or any("cuda" in note for note in plan.notes)


def pair() -> tuple[nn.Module, nn.Module]:
    """Return a model and its average, which differ in parameters and buffers."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    for tensor in averaged.module.state_dict().values():
        tensor.add_(1)
    return model, averaged


def values(module: nn.Module) -> dict[str, list]:
    """Return a module's state as lists."""
    return {
        key.removeprefix("module."): tensor.tolist()
        for key, tensor in module.state_dict().items()
        if key != "n_averaged"
    }


def test_a_swap_exchanges_parameters_and_buffers() -> None:
    """Exchange values in the same memory inside the block, and exchange them back after it."""
    model, averaged = pair()
    own, other, address = values(model), values(averaged), model[0].weight.data_ptr()
    swap = Swap(model, averaged)
    with swap:
        assert swap.swapped and values(model) == other and values(averaged) == own
        assert model[0].weight.data_ptr() == address
    assert not swap.swapped and values(model) == own and values(averaged) == other


def test_a_failing_block_swaps_back() -> None:
    """Swap back after an exception, so that training does not continue on averaged weights."""
    model, averaged = pair()
    own = values(model)
    with pytest.raises(ValueError, match="no"), Swap(model, averaged):
        raise ValueError("no")
    assert values(model) == own


def test_a_save_while_swapped_resumes_swapped() -> None:
    """Save the flag, so that swapping back after a resume gives the model its own weights."""
    model, averaged = pair()
    own = values(model)
    swap = Swap(model, averaged)
    with swap:
        captured = capture({"model": model, "ema": averaged, "swap": swap}, rng=False)
        stored = save({"model": model, "ema": averaged, "swap": swap}, rng=False)
    assert any("swap" in line and "in" in line for line in captured.found)
    fresh_model, fresh_averaged = pair()
    fresh = Swap(fresh_model, fresh_averaged)
    restore(stored, {"model": fresh_model, "ema": fresh_averaged, "swap": fresh})
    assert fresh.swapped
    fresh.swap()
    assert values(fresh_model) == own


def test_a_swap_works_through_wrappers_and_on_copies() -> None:
    """Pair a compiled model and a plain deep copy by their own names."""
    model, _ = pair()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.add_(1)
    model[0] = torch.compile(model[0])
    own = values(model)
    with Swap(torch.compile(model), twin):
        assert values(model) != own
    assert values(model) == own


def test_a_swap_with_a_stranger_changes_nothing() -> None:
    """Refuse modules that do not match before any value was exchanged."""
    model, _ = pair()
    stranger = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    own, other = values(model), values(stranger)
    with pytest.raises(RelightError):
        Swap(model, stranger).swap()
    assert values(model) == own and values(stranger) == other


@pytest.mark.parametrize("attribute", ["swapped", "is_swapped", "swapped_in"])
def test_other_libraries_flags_are_reported(attribute: str) -> None:
    """List an averaging object as swapped if its flag states it."""

    class Average:
        def state_dict(self) -> dict:
            return {"decay": 0.9}

        def load_state_dict(self, state: dict) -> None:
            pass

    average = Average()
    setattr(average, attribute, True)
    captured = capture({"ema": average}, rng=False)
    assert any("ema" in line and "swapped in" in line for line in captured.found)
    assert any("ema" in line for line in captured.notes), "the flag is not in its state_dict: the resume will not know"


def test_the_environment_is_json_and_equal_to_itself() -> None:
    """Return an environment that JSON can represent, and that equals itself."""
    now = environment()
    assert json.loads(json.dumps(now)) == now
    assert differences(now, environment()) == []
    for key in (
        "python",
        "torch",
        "numpy",
        "relight",
        "threads",
        "interop_threads",
        "cpu_capability",
        "argv",
        "code",
        "devices",
    ):
        assert key in now, key


def test_differences_that_break_exactness_are_reported_one_by_one() -> None:
    """Report each difference of threads, determinism, precision, TF32 and versions as a sentence."""
    before, threads = environment(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("medium")
        changes = differences(before, environment())
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest")
    for word in ("threads", "deterministic", "benchmark", "TF32", "matri"):
        assert any(word in line for line in changes), word


def test_the_code_revision_is_that_of_the_script_not_of_the_folder(tmp_path: Path) -> None:
    """Return the revision of the script's repository from any working directory, quickly; None without a repository."""
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(tmp_path)]
    script = tmp_path / "train.py"
    script.write_text(
        "import json\nfrom relight.capture import environment\nprint(json.dumps(environment()['code']))\n"
    )
    if subprocess.run([*git, "init", "-q"], check=False).returncode:
        pytest.skip("no git")

    env = {**os.environ, "PYTHONPATH": str(Path(room.__file__).parents[2])}

    def run() -> object:
        done = subprocess.run(
            [sys.executable, str(script)], cwd="/", capture_output=True, text=True, check=True, env=env
        )
        return json.loads(done.stdout)

    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    code = run()
    assert isinstance(code, dict) and len(code["commit"]) == 40 and code["changes"] is None
    script.write_text(script.read_text() + "# changed\n")
    assert run()["changes"]


def test_git_is_awaited_only_when_its_answer_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for git only when its answer is needed, in any number of threads. A missing answer counts as none."""
    module = sys.modules["relight.capture.environment"]

    asked, may_answer = threading.Event(), threading.Event()

    def slow() -> dict[str, object]:
        asked.set()
        assert may_answer.wait(20)
        return {"commit": "c", "changes": None}

    monkeypatch.setattr(module, "code_revision", slow)
    given = environment_soon()
    assert asked.wait(20)
    revisions: list[object] = []
    threads = [threading.Thread(target=lambda: revisions.append(given()["code"])) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert revisions == []
    may_answer.set()
    for thread in threads:
        thread.join()
    assert revisions == [{"commit": "c", "changes": None}] * 3
    monkeypatch.setattr(module, "_CODE_S", 0.0)
    may_answer.clear()
    assert environment_soon()()["code"] is None
    may_answer.set()


def test_changed_code_is_reported_even_if_uncommitted() -> None:
    """Treat equal commits with different uncommitted changes as different code, and with equal changes as equal
    code."""
    clean, first, second = ({"code": {"commit": "a" * 40, "changes": digest}} for digest in (None, "1", "2"))
    assert differences(clean, clean) == [] and differences(first, first) == []
    assert differences(clean, first) and differences(first, second) and differences(second, clean)


def test_public_names_are_pinned() -> None:
    """Check the names that other packages import."""
    assert {
        "Captured", "LoadPlan", "RestorePlan", "Swap", "build_tree", "capture", "differences", "environment", "environment_soon", "fingerprint",
        "is_large", "observe_batches", "plan_restore", "unwatch_loaders", "watch_loaders",
    } <= set(room.__all__)  # fmt: skip


def test_the_tree_of_generators_loads_without_objects() -> None:
    """Store random states as arrays and numbers, which any reader can load."""
    tree = load(save({}))["rng"]
    assert (
        isinstance(tree["torch"], torch.Tensor) and isinstance(tree["python"], dict) and isinstance(tree["numpy"], dict)
    )
