"""Without a private name of torch, what replaces it works, or an error has the name and torch's version.

Each case is a process with a torch that calls some names otherwise (``renamed.py``), and a scenario (``child.py``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.utils.data._utils import signal_handling

from relight.errors import ConfigError
from relight.observe import subscribe
from relight.torch_private import flat_parameters, loaders, ranks, tensors
from relight.torch_private import names as names_of_torch
from relight.torch_private.names import TorchName
from relight.torch_private.table import TABLE

CHILD = Path(__file__).parent / "child.py"
FLAT = ("_handle", "_shard_param_infos", "_reshard", "_inter_node_pg")


class Case(NamedTuple):
    """A scenario, the names that torch lacks in it, and texts that the process prints."""

    scenario: str
    names: str
    prints: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    """Names without a warning: an error reports them instead, or torch has them again, as it needs them itself."""


CASES = (
    Case("versions", "torch.Tensor:_version"),
    Case("modules", "_parameters _buffers _modules _non_persistent_buffers_set"),
    Case(
        "modules", "_state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks _load_state_dict_post_hooks"
    ),
    Case("modules", "_save_to_state_dict"),
    Case("modules", "_load_from_state_dict"),
    Case("wrapped", "_orig_mod"),
    Case("wrapped", "_checkpoint_wrapped_module"),
    Case("flattened", "_fsdp_wrapped_module"),
    Case("own_loading", "_buffers", ("refused: ",)),
    Case("optimizers", "_optimizer_step_pre_hooks _optimizer_step_post_hooks"),
    Case(
        "optimizers",
        "_optimizer_state_dict_pre_hooks _optimizer_state_dict_post_hooks "
        "_optimizer_load_state_dict_pre_hooks _optimizer_load_state_dict_post_hooks",
    ),
    Case("schedulers", "_schedulers"),
    Case("schedulers", "_last_lr"),
    Case("outside", "_opt_called _step_count _zero_grad_profile_name _warned_capturable_if_run_uncaptured"),
    Case("signals", "_worker_loop"),
    Case("torchdata", "_num_yielded _sampler_iter_yielded"),
    Case("sharded", "_StridedShard", ("halves: None",)),
    Case("loaders", "_index_sampler"),
    Case("loaders", "_iterator _base_seed _shared_seed"),
    Case("numpy_seeds", "_generate_state"),
    Case("values", "torch.Tensor:_indices torch.Tensor:_values"),
    Case("values", "torch.Tensor:_coalesced_"),
    Case("values", "torch:_make_per_tensor_quantized_tensor torch:_make_per_channel_quantized_tensor"),
    *(
        Case("flattened", name, (f"refused: FullyShardedDataParallel in a checkpoint does not support torch {torch.__version__}",), (name,))
        for name in FLAT
    ),
    Case("flattened", "_fsdp_flattened _is_flat_param", ("flat: True False",)),
    Case("subclasses", "torch._C:DisableTorchFunctionSubclass", ("refused: ",), ("DisableTorchFunctionSubclass",)),
)  # fmt: skip


def run(scenario: str, *names: str) -> str:
    """Run a scenario without the names. Return what it printed."""
    command = [sys.executable, str(CHILD), scenario, *names]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.scenario}-{case.names.split()[0]}")
def test_each_fall_back_works(case: Case) -> None:
    """The scenario passes, and one warning is emitted for each missing name."""
    names = case.names.split()
    printed = run(case.scenario, *names)
    missing = [line.rpartition(".")[2] for line in printed.splitlines() if line.startswith("missing ")]
    assert sorted(missing) == sorted({name.rpartition(":")[2] for name in names} - set(case.silent)), printed
    assert all(text in printed for text in case.prints), printed


@pytest.mark.parametrize("scenario", sorted({case.scenario for case in CASES}))
def test_each_scenario_passes_with_all_names(scenario: str) -> None:
    """Nothing is reported or refused, except for what no torch allows."""
    printed = run(scenario)
    assert "missing " not in printed and "refused: " not in printed, printed
    assert "twice: sharded in" not in printed


@pytest.mark.parametrize("name", TABLE, ids=str)
def test_the_installed_torch_has_each_name(name: TorchName) -> None:
    """Each is found where it is expected, so a missing one would be noticed. It states its use and its fall-back."""
    if name.owner.startswith("torchdata"):
        pytest.importorskip("torchdata")
    assert name.exists and not TorchName(name.owner, f"{name.name}_of_the_future").exists
    assert name.use and name.otherwise


def test_the_seed_for_numpy_is_torchs() -> None:
    """numpy's SeedSequence gives the numbers of torch's private function."""
    seeds = run("numpy_seeds")
    assert seeds == "".join(
        line + "\n" for line in run("numpy_seeds", "_generate_state").splitlines() if line[0] == "["
    )


@pytest.mark.parametrize("name", flat_parameters.FLAT, ids=str)
def test_a_missing_name_of_flat_parameters_is_an_error(name: TorchName, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the name and torch's version, and the alternative. It is not raised for other modules."""
    gone = name._replace(name=f"{name.name}_of_the_future")
    monkeypatch.setattr(flat_parameters, "FLAT", (gone,))
    flat_parameters.check_flat_names.cache_clear()
    with pytest.raises(ConfigError) as caught:
        flat_parameters.flat_handle(torch.nn.Linear(1, 1))
    flat_parameters.check_flat_names.cache_clear()
    words = str(caught.value)
    assert torch.__version__ in words and str(gone) in words and "use fully_shard()" in words


def test_a_checkpointer_on_several_ranks_names_the_missing_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of the default group cannot be had otherwise."""
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_get_default_store")
    with pytest.raises(ConfigError, match="on several ranks does not support torch .*_get_default_store"):
        ranks.default_store()


def test_a_worker_runs_without_the_handlers_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs unprotected, and the trainer reports the name once."""
    monkeypatch.setattr(names_of_torch, "_reported", set())
    monkeypatch.delattr(signal_handling, "_set_worker_signal_handlers")
    reported: list[str] = []
    undo = subscribe(lambda event: reported.append(event.fields["missing"]))
    for _ in range(2):
        loaders.report_unprotected_workers()
        loaders.after_worker_handlers(lambda: pytest.fail("torch installed no handlers"))
    undo()
    assert reported == ["torch.utils.data._utils.signal_handling._set_worker_signal_handlers"]


class OtherDTensor:
    """A DTensor without private names. torch sets those of its own in C, so they cannot be called otherwise."""

    def __init__(self, *dims: int) -> None:
        self.whole, self.placements = torch.arange(6.0).view(2, 3), [Shard(dim) for dim in dims]

    def to_local(self) -> torch.Tensor:
        """Return the part on this rank."""
        return self.whole


def test_a_dtensor_without_private_names_is_read_by_public_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """``to_local()`` returns its memory. It is refused if a dimension may have been sharded in another order."""
    monkeypatch.setattr(names_of_torch, "_reported", set())
    for name in ("_LOCAL", "_SPEC"):
        monkeypatch.setattr(tensors, name, getattr(tensors, name)._replace(name=f"{name}_of_the_future"))
    reported: list[str] = []
    undo = subscribe(lambda event: reported.append(event.fields["missing"]))
    tensor = OtherDTensor(0, 1)
    assert tensors.settled_shard(tensor) is tensor.whole
    assert tensors.settled_shard(tensor) is tensor.whole
    assert tensors.unusual_order(tensor) == ""
    assert f"unknown in torch {torch.__version__}, which lacks" in tensors.unusual_order(OtherDTensor(1, 1))
    undo()
    owner = "torch.distributed.tensor.DTensor"
    assert reported == [f"{owner}._LOCAL_of_the_future", f"{owner}._SPEC_of_the_future"]


class Unfinished(torch.Tensor):
    """A local tensor that a collective still fills, in another torch."""

    __module__ = "torch.distributed.collectives"


def test_a_tensor_that_a_collective_fills_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any operation waits for the collective."""
    tensor = OtherDTensor(0)
    tensor.whole = tensor.whole.as_subclass(Unfinished)
    settled = tensors.settled_shard(tensor)
    assert torch.equal(settled, tensor.whole) and settled.data_ptr() != tensor.whole.data_ptr()
