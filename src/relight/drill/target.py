"""Target of a drill: a script under ``relight run``, and its store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relight.comm.children import child_command
from relight.errors import ConfigError

STORE = "{store}"
"""Placeholder for the drill's own store, in the script's arguments or in ``--env``."""
STEPS = 400
"""Number of steps of the built-in job."""


@dataclass(frozen=True, slots=True)
class DrillTarget:
    """The job to drill. ``flags`` are torchrun's flags, which precede the script."""

    flags: Sequence[str] = ("--nproc-per-node", "2")
    script: Sequence[str] = ()
    """The script and its arguments; empty for the built-in job."""
    settings: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    can_be_ordered: bool = True
    """Whether the script can be ordered to fail: True for a Python script."""

    @property
    def built_in(self) -> bool:
        """Whether it is the drill's own job. The bits of its final state are known."""
        return not self.script

    @property
    def name(self) -> str:
        """Description for people."""
        return "the built-in job" if self.built_in else " ".join(self.script)[:200]

    def command(self, folder: Path, store: Path, *flags: str, without: int = -1) -> list[str]:
        """Return the command of ``relight run``. ``flags`` are added to torchrun's. The built-in job skips the samples of ``without``."""
        command = child_command("relight", "run", "--incidents", str(folder / "incidents"))
        if self.settings:
            command += ["--settings", self.settings]
        script = [argument.replace(STORE, str(store)) for argument in self.script]
        if self.built_in:
            script = ["-m", "relight.drill.job", str(store), str(STEPS), str(folder / "out"), str(without)]
        elif "-m" in self.flags or "--module" in self.flags:
            script = ["-m", *script]
        own = [flag for flag in self.flags if flag not in ("-m", "--module")]
        if not self.can_be_ordered:
            return [*command, *own, *flags, *script]
        return [*command, *own, *flags, "-m", "relight.drill.script", str(folder / "orders"), str(store), *script]

    def environment(self, store: Path) -> dict[str, str]:
        """Return the environment variables to add for the job."""
        return {name: value.replace(STORE, str(store)) for name, value in self.env.items()}


def target_of(arguments: Sequence[str], settings: str, env: Sequence[str]) -> DrillTarget:
    """Parse the command line: torchrun's flags, the script, its arguments. Raise ``ConfigError`` if no argument names the drill's store."""
    named = {}
    for assignment in env:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise ConfigError(f"--env takes NAME=VALUE, not {assignment!r}")
        named[name] = value
    if not arguments:
        return DrillTarget(settings=settings, env=named)
    from relight.supervise.launch import parse  # torch's, and slow to import

    options = parse(list(arguments))
    rest = list(options.training_script_args)
    script_at = len(arguments) - len(rest) - 1
    script = [options.training_script, *rest]
    if list(arguments[script_at:]) != script:
        raise ConfigError(
            "the script's position in the arguments is ambiguous",
            hint="relight drill [TORCHRUN'S FLAGS] SCRIPT [ARGS]…",
        )
    if not any(STORE in argument for argument in [*rest, *named.values()]):
        raise ConfigError(
            "no argument names the drill's store for the script",
            hint="write {store} in place of its store: relight drill train.py --store {store}, or --env STORE={store}",
        )
    return DrillTarget(
        tuple(arguments[:script_at]), tuple(script), settings, named, can_be_ordered=not options.no_python
    )
