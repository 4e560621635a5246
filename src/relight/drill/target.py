"""Target of a drill: a script under ``relight run``, and its store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relight.comm.children import child_command
from relight.errors import ConfigError

STORE = "{store}"
"""Stands in the script's arguments, or in ``--env``, for the drill's own store."""
STEPS = 400
"""Of the built-in job."""


@dataclass(frozen=True, slots=True)
class DrillTarget:
    """A job. ``flags`` are torchrun's, in front of the script."""

    flags: Sequence[str] = ("--nproc-per-node", "2")
    script: Sequence[str] = ()
    """The script and its arguments; empty: the job that is built in."""
    settings: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    told: bool = True
    """Whether the script can be told to fail: not if it is no Python script."""

    @property
    def built_in(self) -> bool:
        """Whether it is the job that the drill brings: its end is known, to the bit."""
        return not self.script

    @property
    def name(self) -> str:
        """Description for people."""
        return "the built-in job" if self.built_in else " ".join(self.script)[:200]

    def command(self, folder: Path, store: Path, *flags: str, without: int = -1) -> list[str]:
        """``relight run`` it. ``flags`` are added to torchrun's; the built-in job leaves out the samples of step ``without``."""
        command = child_command("relight", "run", "--incidents", str(folder / "incidents"))
        if self.settings:
            command += ["--settings", self.settings]
        script = [argument.replace(STORE, str(store)) for argument in self.script]
        if self.built_in:
            script = ["-m", "relight.drill.job", str(store), str(STEPS), str(folder / "out"), str(without)]
        elif "-m" in self.flags or "--module" in self.flags:
            script = ["-m", *script]
        own = [flag for flag in self.flags if flag not in ("-m", "--module")]
        if not self.told:
            return [*command, *own, *flags, *script]
        return [*command, *own, *flags, "-m", "relight.drill.script", str(folder / "orders"), str(store), *script]

    def environment(self, store: Path) -> dict[str, str]:
        """What is added to it."""
        return {name: value.replace(STORE, str(store)) for name, value in self.env.items()}


def target_of(arguments: Sequence[str], settings: str, env: Sequence[str]) -> DrillTarget:
    """As they were typed: torchrun's flags, the script, its arguments. ``ConfigError`` if nothing says where the script is to save."""
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
        raise ConfigError("it cannot be seen where the script begins", hint="relight drill [TORCHRUN'S FLAGS] SCRIPT [ARGS]…")
    if not any(STORE in argument for argument in [*rest, *named.values()]):
        raise ConfigError(
            "nothing says where the script is to save in a drill",
            hint="write {store} where its store stands: relight drill train.py --store {store}, or --env STORE={store}",
        )
    return DrillTarget(tuple(arguments[:script_at]), tuple(script), settings, named, told=not options.no_python)
