"""``python -m tests.device.adversary``: saves and restores on the simulated accelerator. Its scheduler is an adversary.

A life is a training job with one Checkpointer, and each of its rounds is a trial: some steps, a save, a restore or a failure
of the device, under a scheduler seeded for the round. The same kernels run on the host at once, with the same results to the
bit. Invariants:

- A save that reports no error has, to the bit, the state at its call.
- A save fails only if the round gave it a reason: a write outside an optimizer, no memory, an error of the device.
- A restored tensor has the saved bytes, whichever stream uses it next, and so does each generator.
- No call waits for ever, and no error of a save reaches training.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.device import simulated
from torch import nn

import relight
from proofs.report import Report, engine_parser, run_engine
from proofs.seeded_bugs import Bug, Edit, plant
from relight.capture import environment
from relight.checkpointer.page_locks import RUNTIMES, Registration
from relight.snapshot import device as device_copies

ROUNDS = 8
"""Trials of one life."""
WAIT_S = 20.0
"""Seconds after which a save counts as stuck."""
ROUND_KINDS = {
    "save": 6, "save and write with barrier": 1, "save and write": 3, "restore": 2, "foreground save": 1, "no device memory": 1,
    "error of a kernel": 1,
}  # fmt: skip
"""Kinds of rounds, and how often each is chosen."""


class Job(nn.Module):
    """Tensors of a training job on the device, and the same on the host: every kernel is applied to both.

    The host's are exact: it runs the kernels of the device's simulation.
    """

    def __init__(self, rng: random.Random, device: torch.device, sizes: list[int], buffers: int, kind: str) -> None:
        super().__init__()
        self.rng, self.device, self.kind, self.sizes = rng, device, kind, sizes
        torch.manual_seed(rng.randrange(1 << 30))
        self.host_params = [torch.randn(size) for size in sizes]
        self.host_buffers = [torch.randn(size) for size in (5, 70_000, 400_000)[:buffers]]
        self.params = nn.ParameterList([nn.Parameter(tensor.to(device)) for tensor in self.host_params])
        for number, tensor in enumerate(self.host_buffers):
            self.register_buffer(f"buffer{number}", tensor.to(device))
        self.optimizer = _optimizer(kind, list(self.params))
        self.mirror = [nn.Parameter(tensor) for tensor in self.host_params]
        self.host_optimizer = _optimizer(kind, self.mirror)

    def forward_pass(self) -> None:
        """What a forward changes at once: buffers. A kernel that is queued first makes the stream late."""
        for number, host in enumerate(self.host_buffers):
            live = self.get_buffer(f"buffer{number}")
            for tensor in (live, host):
                tensor.mul_(0.75).add_(number + 1.5)

    def backward_pass(self) -> None:
        for live, host in zip(self.params, self.mirror, strict=True):
            scale = self.rng.random()
            for parameter in (live, host):
                parameter.grad = (parameter.detach() * scale).add_(0.25)

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self.host_optimizer.step()
        for parameter in (*self.params, *self.mirror):
            parameter.grad = None

    def write(self) -> None:
        """A write outside an optimizer."""
        number = self.rng.randrange(len(self.sizes))
        with torch.no_grad():
            for parameter in (self.params[number], self.mirror[number]):
                parameter.sub_(3.0)

    def expected(self) -> dict[str, torch.Tensor]:
        """The present state, from the host's copy."""
        state = {f"params.{n}": parameter.detach().clone() for n, parameter in enumerate(self.mirror)}
        state |= {f"buffer{n}": buffer.clone() for n, buffer in enumerate(self.host_buffers)}
        for n, parameter in enumerate(self.mirror):
            for key, value in self.host_optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    state[f"optimizer {n} {key}"] = value.clone()
        return state

    def found(self) -> dict[str, torch.Tensor]:
        """The present state of the device's tensors, copied to the host."""
        state = {f"params.{n}": parameter.detach().cpu() for n, parameter in enumerate(self.params)}
        state |= {f"buffer{n}": self.get_buffer(f"buffer{n}").cpu() for n in range(len(self.host_buffers))}
        for n, parameter in enumerate(self.params):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    state[f"optimizer {n} {key}"] = value.cpu()
        return state

    def load_host(self, state: dict[str, torch.Tensor]) -> None:
        """Make the host's copy equal to a state that ``expected`` returned."""
        with torch.no_grad():
            for n, parameter in enumerate(self.mirror):
                parameter.copy_(state[f"params.{n}"])
                kept = self.host_optimizer.state[parameter]
                kept.clear()
                prefix = f"optimizer {n} "
                kept.update(
                    {key.removeprefix(prefix): each.clone() for key, each in state.items() if key.startswith(prefix)}
                )
            for n, buffer in enumerate(self.host_buffers):
                buffer.copy_(state[f"buffer{n}"])


def _optimizer(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "SGD":
        return torch.optim.SGD(parameters, lr=0.125, momentum=0.5, foreach=True)
    return torch.optim.AdamW(parameters, lr=0.01, foreach=kind == "AdamW foreach", fused=kind == "AdamW fused")


def stored(root: Path, which: str | int) -> dict[str, torch.Tensor]:
    """Read a checkpoint in the form of ``Job.expected``."""
    tree = relight.load(root, which)
    state = dict(tree["job"])
    for name, entry in tree["optimizer"]["state"].items():
        number = str(name).rpartition(".")[2]
        state |= {f"optimizer {number} {key}": value for key, value in entry.items() if isinstance(value, torch.Tensor)}
    return state


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that differ in a bit, or that only one has."""
    names = found.keys() ^ expected.keys()
    names |= {name for name in found.keys() & expected.keys() if not _same_bits(found[name], expected[name])}
    return sorted(names)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )  # fmt: skip


class Accepted(NamedTuple):
    """The newest accepted save."""

    step: int
    state: dict[str, torch.Tensor]
    device: torch.device
    draws: torch.Tensor
    """Numbers that the device's generator draws next."""


class Life:
    """One Checkpointer's life: ``ROUNDS`` trials, then a restart."""

    def __init__(self, seed: int, folder: Path, report: Report) -> None:
        self.seed, self.report = seed, report
        self.rng = random.Random(f"life {seed}")
        self.sim = simulated.load()
        self.root = folder / "store" / "run"
        self.step = 0
        self.accepted: Accepted | None = None
        self.device = torch.device(simulated.NAME, self.rng.randrange(2))
        self.own_stream = self.rng.random() < 0.4
        self.registers = self.rng.random() < 0.6
        self.sizes = [self.rng.choice([3, 1_000, 60_000, 300_000, 700_000]) for _ in range(self.rng.randint(1, 4))]
        self.buffers = self.rng.randint(1, 3)
        self.kind = self.rng.choice(["SGD", "AdamW foreach", "AdamW fused", "AdamW"])
        self.small = self.rng.random() < 0.5
        self.background = True

    def run(self, rounds: int) -> int:
        """Run until ``rounds`` trials are done, the life ends, or something is wrong. Return the number of trials."""
        with self._machine(), contextlib.ExitStack() as stream:
            if self.own_stream:
                stream.enter_context(torch.Stream(device=self.device))
            self._open()
            for number in range(min(rounds, ROUNDS)):
                kinds = list(ROUND_KINDS)
                kind = self.rng.choices(kinds, list(ROUND_KINDS.values()))[0]
                self.sim.adversary(
                    self.seed * 1000 + number, self.rng.choice(["lazy", "mixed", "mixed", "mixed", "eager"])
                )
                wrong = self._guarded(kind)
                self.report.add(f"{self.seed}", kind, wrong, f"round {number}: {kind}")
                if wrong or kind == "error of a kernel":
                    self._end(failed=bool(wrong))
                    return number + 1
            self._end(failed=False)
            return min(rounds, ROUNDS)

    @contextlib.contextmanager
    def _machine(self) -> Iterator[None]:
        """The runtime's abilities in this life."""
        segment, pack = device_copies.SEGMENT, device_copies.PACK_BYTES
        if self.registers:
            lock = Registration(lambda a, n: self.sim.host_register(a, n, self.device.index), self.sim.host_unregister)
            RUNTIMES[simulated.NAME] = lock
        if self.small:  # copies of a few hundred KB in several packs, to several registered ranges
            device_copies.SEGMENT = device_copies.PACK_BYTES = 1 << 20
        locked = self.sim.locked_bytes()
        self.sim.set_locked_limit(locked + (8 << 30 if self.rng.random() < 0.7 else 2 << 20))
        try:
            yield
        finally:
            device_copies.SEGMENT, device_copies.PACK_BYTES = segment, pack
            RUNTIMES.pop(simulated.NAME, None)
            self.sim.set_locked_limit(8 << 30)
            self._revive()

    def _revive(self) -> None:
        for index in range(2):
            self.sim.lose(index, "")
        self.sim.fail_kernel(-1)
        self.sim.fail_allocation(-1)

    def _open(self) -> None:
        self.job = Job(self.rng, self.device, self.sizes, self.buffers, self.kind)
        self.ckpt = relight.Checkpointer(
            self.root, job=self.job, optimizer=self.job.optimizer, save=None, signals=False, background=self.background,
            limits=relight.Limits(when_busy="queue", deadline_s=WAIT_S), takeover="take",
        )  # fmt: skip
        begun = self.ckpt.restore()
        if self.accepted is not None:
            assert begun == self.accepted.step + 1, f"restored step {begun}, accepted was {self.accepted.step}"
            self.job.load_host(self.accepted.state)

    def _end(self, failed: bool) -> None:
        with contextlib.suppress(Exception) if failed else contextlib.nullcontext():
            self.ckpt.close(save=False)
        self._revive()

    def _guarded(self, kind: str) -> list[str]:
        try:
            return self._round(kind)
        except Exception as error:  # every exception that a round does not expect is a violation
            return [f"{type(error).__name__}: {error}"[:600]]

    def _train(self) -> None:
        self.job.forward_pass()
        self.job.backward_pass()
        self.job.optimizer_step()
        self.step += 1

    def _round(self, kind: str) -> list[str]:
        draws = self._next_draws()  # waits for the device, so it comes before the kernels of this round
        if kind == "foreground save":
            return self._foreground(draws)
        for _ in range(self.rng.randint(0 if not self.step else 1, 2)):  # the optimizer's first step changes the layout
            self._train()
        if kind == "restore":
            return self._restore()
        if kind == "error of a kernel":
            return self._kernel_error(draws)
        expected = self.job.expected()
        if kind == "no device memory":
            self.sim.fail_allocation(self.rng.randrange(3))
        if self.rng.random() < 0.7:  # training's kernels take so long that its host code is ahead of them
            self.sim.sleep(self.device.index, self.rng.choice([0.003, 0.01]))
        save = self.ckpt.save(self.step, block=False)
        self.sim.fail_allocation(-1)
        if kind == "save and write":
            self.job.write()
        if kind == "save and write with barrier":
            self.ckpt.barrier()
            self.job.write()
        self.job.forward_pass()
        self.job.backward_pass()
        if self.rng.random() < 0.8:
            self.job.optimizer_step()
            self.job.forward_pass()
            self.job.backward_pass()
            self.job.optimizer_step()
        return self._judge(save, expected, draws, may_fail=kind == "save and write")

    def _judge(self, save: Any, expected: dict[str, torch.Tensor], draws: torch.Tensor, *, may_fail: bool) -> list[str]:
        try:
            save.wait(WAIT_S)
        except relight.RelightError as error:
            self.report.counts["refused saves"] += 1
            return [] if may_fail else [f"a save failed without a reason: {error}"]
        self.report.counts["accepted saves"] += 1
        self.accepted = Accepted(save.step, expected, self.device, draws)
        wrong = differences(stored(self.root, save.id), expected)
        return [f"the checkpoint of step {save.step} differs from the state at the call: {wrong}"] if wrong else []

    def _next_draws(self) -> torch.Tensor:
        """Numbers that the device's generator would draw next. It does not move."""
        state = self.sim.get_rng_state(self.device)
        drawn = torch.rand(4, device=self.device).cpu()
        self.sim.set_rng_state(state, self.device)
        return drawn

    def _foreground(self, draws: torch.Tensor) -> list[str]:
        """A save of this process, by its own reading threads, while kernels are still queued."""
        self.ckpt.close(save=False)
        self.background = False
        self._reopen_with(self.job)
        self._train()
        expected = self.job.expected()
        save = self.ckpt.save(self.step)
        wrong = self._judge(save, expected, draws, may_fail=False)
        self.ckpt.close(save=False)
        self.background = True
        self._reopen_with(self.job)
        return wrong

    def _reopen_with(self, job: Job) -> None:
        """A new Checkpointer that takes the live state unchanged."""
        self.ckpt = relight.Checkpointer(
            self.root, job=job, optimizer=job.optimizer, save=None, signals=False, background=self.background,
            limits=relight.Limits(when_busy="queue", deadline_s=WAIT_S), takeover="take",
        )  # fmt: skip
        self.ckpt.restore(only=[])

    def _restore(self) -> list[str]:
        """A restart: other objects, on either device, that are used at once after the restore."""
        self.ckpt.close(save=False)
        if self.rng.random() < 0.3:
            self.device = torch.device(simulated.NAME, 1 - self.device.index)
        self._open()
        if self.accepted is None:
            return []
        wrong = differences(self.job.found(), self.accepted.state)
        if wrong:
            return [f"restored tensors differ: {wrong}"]
        self.job.forward_pass()  # on this thread's stream, right after the restore
        again = differences(self.job.found(), self.job.expected())
        drawn = torch.rand(4, device=self.device).cpu()
        if again:
            return [f"kernels after the restore saw other bytes: {again}"]
        same = torch.equal(drawn, self.accepted.draws) or self.device != self.accepted.device
        return [] if same else ["the device's generator continues elsewhere"]

    def _kernel_error(self, draws: torch.Tensor) -> list[str]:
        """A kernel fails some time after the save's call, or the device is lost. The process then ends, and the next one restores."""
        expected = self.job.expected()
        lost = self.rng.random() < 0.3
        if not lost:
            self.sim.fail_kernel(self.rng.randrange(12))
        wrong: list[str] = []
        save = None
        with contextlib.suppress(RuntimeError):  # training reports the device's error
            save = self.ckpt.save(self.step, block=False)
        if lost:
            self.sim.lose(self.device.index, "sim: the device is lost")
        with contextlib.suppress(RuntimeError):
            self.job.forward_pass()
            self.job.backward_pass()
            self.job.optimizer_step()
        if save is not None:
            try:
                save.wait(WAIT_S)
            except relight.RelightError as error:
                if "not durable after" in str(error):
                    wrong.append(f"the save never ended: {error}")
            else:
                self._revive()
                wrong += self._judge(save, expected, draws, may_fail=True)
        with contextlib.suppress(RuntimeError):
            self.ckpt.close(save=False)
        self._revive()
        if self.accepted is not None and not wrong:
            other = differences(stored(self.root, "latest"), self.accepted.state)
            wrong += [f"after the error the newest checkpoint differs: {other}"] if other else []
        return wrong


def run(count: int, seed: int, bug: Bug | None = None, *, stop: bool = False) -> Report:
    """Run lives until ``count`` trials are done. ``stop``: end at the first violation."""
    report = Report(
        "trials", seed=seed, replay="--first {} --count 12", needs="accepted saves", expected=0 if stop else count
    )
    simulated.load().unregister_all()
    environment.code_revision = lambda: None  # git would take longer than a trial
    with plant(bug), report.timed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        life = seed
        while report.total < count and not (stop and report.violated):
            folder = Path(tempfile.mkdtemp(prefix="relight-device-"))
            try:
                Life(life, folder, report).run(count - report.total)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            life += 1
    return report


COPIES, LOCKS, TENSORS = "relight.snapshot.device", "relight.checkpointer.page_locks", "relight.capture.tensors"

PLANTED: dict[str, Bug] = {
    "the side stream does not wait for training's kernels": Bug(
        Edit(f"{COPIES}:DeviceCopies.begin", "        self._side.wait_event(start)\n", "")
    ),
    "the end of the copies is recorded on training's stream": Bug(
        Edit(
            f"{COPIES}:DeviceCopies.begin",
            "snapshot.copied.record(self._side)",
            "snapshot.copied.record(torch.accelerator.current_stream(self.device))",
        )
    ),
    "the start of the copies is recorded on the side stream": Bug(
        Edit(
            f"{COPIES}:DeviceCopies.begin",
            "start.record(torch.accelerator.current_stream(self.device))",
            "start.record(self._side)",
        )
    ),
    "the optimizer does not wait for the copies": Bug(
        Edit(
            f"{COPIES}:DeviceSnapshot.before_step",
            "        torch.accelerator.current_stream(self._copies.device).wait_event(self.copied)\n",
            "",
        )
    ),
    "the save does not wait for the copies": Bug(
        Edit(f"{COPIES}:DeviceSnapshot.finish", "        self.copied.synchronize()\n", "")
    ),
    "a pack is made on a stream that its copy does not wait for": Bug(
        Edit(
            f"{COPIES}:_Packed.queue",
            "                together = torch.cat([placed.bytes for placed in pack.held])\n",
            "                device = pack.held[0].tensor.device\n"
            "                with torch.get_device_module(device).stream(torch.Stream(device=device)):\n"
            "                    together = torch.cat([placed.bytes for placed in pack.held])\n",
        )
    ),
    "an error of the copies is dropped": Bug(
        Edit(
            f"{COPIES}:DeviceSnapshot.finish",
            "        self.copied.synchronize()\n",
            "        try:\n            self.copied.synchronize()\n        except RuntimeError:\n            pass\n",
        )
    ),
    "writes outside the optimizer are not noticed": Bug(
        Edit(f"{COPIES}:DeviceCopies._touched", "if read_version(tensor) != then", "if False"),
        Edit(f"{COPIES}:_Samples.queue", "        return True\n", "        return False\n"),
    ),
    "neither versions nor samples of copied tensors are compared": Bug(
        Edit(f"{COPIES}:DeviceCopies._touched", "if read_version(tensor) != then", "if False"),
        Edit(f"{COPIES}:_Samples.differing", "!= samples[start : start + width]", "!= ctypes.string_at(slot + offset, width)"),
    ),
    "writes after the optimizer's step count as writes before it": Bug(
        Edit(f"{COPIES}:DeviceSnapshot.before_step", "        self._check()\n", "")
    ),
    "buffers are copied on the side stream": Bug(
        Edit(
            "relight.checkpointer.slot_copy_plan:SlotCopyPlan.__init__",
            "devices[away.device][may_wait].append",
            "devices[away.device][True].append",
        )
    ),
    "large tensors that arrived are not copied to the slot": Bug(
        Edit(f"{COPIES}:_Packed.copy_to_slot", "        self.arrived.copy(slot)\n", "")
    ),
    "a copy crosses the end of a registered range": Bug(
        Edit(
            f"{COPIES}:_Packed.queue",
            "in pieces(placed.offset, data.numel()):",
            "in [(placed.offset, placed.offset + data.numel())]:",
        )
    ),
    "memory is unmapped while it is registered": Bug(
        Edit(
            f"{LOCKS}:pin_memory",
            "            memory.before_unmap(partial(_unlock, os.getpid(), runtime, locked))\n",
            "",
        )
    ),
    "the error of a refused registration stays": Bug(
        Edit(f"{LOCKS}:pin_memory", "                    _clear_error(element)\n", "")
    ),
    "no device memory for a pack fails the save": Bug(
        Edit(f"{COPIES}:_Packed.queue", "except torch.OutOfMemoryError:", "except ZeroDivisionError:")
    ),
    "restored tensors are used before they are copied": Bug(
        Edit("relight.capture.accelerator:finish_kernels", "        torch.accelerator.synchronize(device)\n", "        pass\n")
    ),
    "the restore reuses a page-locked buffer at once": Bug(
        Edit(
            f"{TENSORS}:_page_locked",
            "return torch.empty(count, dtype=dtype, device=\"cpu\", pin_memory=True)",
            "return globals().setdefault('_kept', torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True))"
            "[: count * dtype.itemsize].view(dtype)",
        )
    ),
    "the generators of the device are not restored": Bug(
        Edit("relight.capture.rng:restore_devices", "            module.set_rng_state(state, index)\n", "            pass\n")
    ),
}  # fmt: skip
"""Faults of the device's path, planted one at a time: ``run`` must find each."""


FIRST_LIVES = {
    "an error of the copies is dropped": 4,
    "a copy crosses the end of a registered range": 10,
    "the error of a refused registration stays": 11,
    "no device memory for a pack fails the save": 2,
    "restored tensors are used before they are copied": 10,
}
"""Lives in which the rarer ones were found at once. The search begins there."""


def main() -> int:
    """Run trials, or each planted bug until it is found."""
    parser = engine_parser("tests.device.adversary", __doc__, 10_000)
    parser.add_argument("--first", type=int, help="the first life, as a violation names it")
    parser.add_argument("--planted", action="store_true", help="plant each bug, and count the trials until it is found")

    def planted_bugs() -> Report:
        report = Report("planted bugs", replay="--planted")
        with report.timed():
            for name, bug in PLANTED.items():
                trials = run(200, FIRST_LIVES.get(name, 0), bug, stop=True)
                why = trials.violations[0].wrong[0] if trials.violations else ""
                print(
                    f"{name}: {f'found after {trials.total} trials: {why}' if why else 'not found'}",
                    file=sys.stderr,
                    flush=True,
                )
                report.add(name, "found" if why else "not found", [] if why else ["not found within 200 trials"])
        return report

    def chosen(options: Any) -> Report:
        return (
            planted_bugs()
            if options.planted
            else run(options.count, options.seed if options.first is None else options.first)
        )

    return run_engine(parser, chosen)


if __name__ == "__main__":
    sys.exit(main())
