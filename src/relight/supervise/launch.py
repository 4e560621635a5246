"""``relight run``: torchrun's flags, rendezvous and agent. Relight's supervisor decides about failures."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import uuid
from collections.abc import Callable
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

from torch.distributed import run as torchrun
from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig

from relight.comm.children import child_command, script_directory
from relight.errors import ConfigError
from relight.observe.masking import mask_arguments
from relight.policy.grace import GRACE, grace_of, kept_back
from relight.settings.environment import text_of
from relight.settings.supervise_settings import SuperviseSettings
from relight.supervise.departing import SERVE_S, Departing
from relight.supervise.elastic_agent import SupervisedAgent
from relight.supervise.job_secret import job_secret
from relight.supervise.load import Load
from relight.supervise.notices import Notices
from relight.supervise.nvml import find_nvml
from relight.supervise.prediction_thread import PredictionThread
from relight.supervise.refusals import check_descriptors, limit_of, shown_refusal
from relight.supervise.rendezvous import Forged, Meetings
from relight.supervise.rendezvous_port import OWN_STORE
from relight.supervise.rendezvous_thread import LOST, EndedElsewhere, Joining
from relight.supervise.spare import USUAL, WORKER, Spares
from relight.supervise.supervisor import Supervisor
from relight.supervise.within import within

T = TypeVar("T")
SAVED, UNSAVED = 75, 76
"""Exit codes of a job that was asked to end: with its last step stored, and with only an earlier checkpoint stored."""
LEFT = 77
"""Exit code of a machine that must not be used again: the other nodes continue without it."""
_NEWER_OPTIONS = (
    "event_log_handler", "numa_options", "duplicate_stdout_filters", "duplicate_stderr_filters", "virtual_local_rank",
)  # fmt: skip
"""torchrun's options that older releases of torch lack."""
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""Signals that torchrun handles where it has no option for them, before torch 2.10."""
JOIN_S = 600
"""torchrun's own ``join_timeout``: seconds to wait for enough nodes, and for a rendezvous after a lost connection."""


class JobEnd(NamedTuple):
    """Result of a job: the exit code, and a message for the user."""

    code: int
    message: str
    where: str = ""
    """Where the incidents are stored."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return torchrun's options from a command line.

    Raise ``ConfigError`` for a flag that torchrun does not have, or without a script.
    """
    parser = _parser()
    end = _script_at(parser, arguments) + 1
    options = parser.parse_args(arguments[:end])
    options.training_script_args += arguments[end:]
    return options


class _Parser(argparse.ArgumentParser):
    """torchrun's parser, with errors of one line instead of sixty lines of usage."""

    def error(self, message: str) -> NoReturn:
        """Raise ``ConfigError``."""
        if "training_script" in message:
            hint = "relight run [TORCHRUN'S FLAGS] SCRIPT [ARGS]…; what follows the script is its own"
            raise ConfigError("no script is named", hint=hint)
        near = ""
        if message.startswith("unrecognized"):
            unknown = next((word for word in message.split() if word.startswith("-")), "")
            close = get_close_matches(unknown, [name for name in self._option_string_actions if "_" not in name], n=1)
            near, message = f"did you mean {close[0]}? " if close else "", f"there is no option {unknown}"
        else:  # argparse names each flag with dashes and with underscores
            message = re.sub(r"^argument (--[a-z-]+)\S*: invalid int value: ", r"\1 is not a whole number: ", message)
        raise ConfigError(message, hint=f"{near}relight run --help has Relight's options, torchrun --help the others")


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = torchrun.get_args_parser()
    parser.prog, parser.__class__ = "relight run", _Parser
    return parser


def flag_length(arguments: list[str]) -> int:
    """Return how many of ``arguments`` the first one, a flag of torchrun, takes: 1, or 2 with its value."""
    return _length(_known(_parser()), arguments)


def _known(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {option: action for action in parser._actions for option in action.option_strings}


def _length(known: dict[str, argparse.Action], arguments: list[str]) -> int:
    name, value, _ = arguments[0].partition("=")
    candidates = (
        [known[name]] if name in known else [action for option, action in known.items() if option.startswith(name)]
    )
    return 1 if value or not candidates or candidates[0].nargs == 0 else 2


def _script_at(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Return the index of the script.

    Only the arguments before it are parsed: argparse would read a script's ``--log`` as ``--log-dir``.
    """
    flags, index = _known(parser), 0
    while index < len(arguments):
        name = arguments[index].partition("=")[0]
        if name == "--":
            return index + 1
        if not name.startswith("-") or name == "-":
            break
        index += _length(flags, arguments[index:])
    return index


def launch(options: argparse.Namespace, settings: SuperviseSettings, incidents: Path) -> JobEnd:
    """Run the job to its end. Installs the signal handlers that torchrun installs, so call it from the main thread."""
    _check_values(options)
    _of_values(lambda: _usual_rendezvous(options))
    keeps_logs = bool(options.log_dir or options.logs_specs) or not options.redirects == options.tee == "0"
    if not options.no_python and not options.run_path and options.redirects == options.tee == "0":
        options.tee = "2"  # the last lines of stderr are evidence of a failure
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] ")
    os.environ.setdefault(OWN_STORE, "1")
    if options.nproc_per_node != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set it as well, with six lines of warning
    config, command, arguments = _of_values(lambda: torchrun.config_from_args(options))
    if config.nproc_per_node < 1:
        raise ConfigError(
            f"a flag of torchrun has an invalid value: --nproc-per-node is {config.nproc_per_node}", hint="1 or more"
        )
    check_descriptors(config.nproc_per_node)
    secret = job_secret(config.max_nodes)
    if not isinstance(command, str):
        raise ConfigError(
            "--run-path starts no processes, so there is nothing to supervise", hint="leave --run-path out"
        )
    if not options.no_python:
        arguments = [*child_command(WORKER, unbuffered=True)[1:], *arguments[1:]]  # in place of -u, before [-m] script
    name = " ".join([options.training_script, *mask_arguments(options.training_script_args)])[:200]
    group = f"{config.rdzv_endpoint} {config.run_id}"[:200] if config.max_nodes > 1 else ""
    supervisor = Supervisor(settings, name, incidents, notices=Notices(settings.notices), group=group)
    gauges = find_nvml() if settings.predict else None
    load = Load(settings.pause, supervisor.pages.ease, gauges if settings.lower_power else None)
    foreseeing = PredictionThread(
        settings,
        supervisor.seen,
        lambda alarm: supervisor.foresee(alarm, settings.drain),
        gauges,
        socket.gethostname(),
        load,
    )
    supervisor.recovery.on_failure = foreseeing.failed
    if gauges is not None:
        supervisor.recovery.devices = gauges.xids
    before = signal.signal(signal.SIGUSR1, lambda *_: supervisor.saves.request("SIGUSR1 came"))
    grace_s = grace_of(text_of(GRACE)) or settings.grace_s
    if grace_s:
        supervisor.end.grace_s = grace_s
        grace_s -= kept_back(grace_s)
        os.environ[GRACE] = f"{max(grace_s, 0.001):g}"  # the ranks' part of the grace period
    script = script_directory(options.training_script, as_module=options.module)
    spares = Spares(config.nproc_per_node if settings.spares else 0, (*USUAL, *settings.preload), script)
    try:
        return _run(config, command, arguments, supervisor, spares, grace_s, secret, keeps_logs)
    except (OSError, RuntimeError, MemoryError) as error:  # torch's agent has ended the ranks
        if not (limit := limit_of(error)):
            raise
        supervisor.end_without_failure("stop", why := shown_refusal(error, limit))
        return JobEnd(1, f"stopped: {why}", supervisor.recovery.log.where)
    finally:
        signal.signal(signal.SIGUSR1, before)
        spares.close()
        foreseeing.close(supervisor.end.left_s)
        supervisor.close()
        if gauges is not None:
            gauges.close()
        if config.logs_specs is not None and not keeps_logs:  # copies of stderr in a temporary directory
            shutil.rmtree(config.logs_specs.root_log_dir, ignore_errors=True)


def _check_values(options: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for an invalid number of nodes or processes, with the flag and what it takes."""
    for flag, value, read, takes in (
        ("--nnodes", options.nnodes, torchrun.parse_min_max_nnodes, "a number of nodes, or MIN:MAX"),
        ("--nproc-per-node", options.nproc_per_node, torchrun.determine_local_world_size, "a number, cpu, gpu or auto"),
    ):
        try:
            read(value)
        except (ValueError, AssertionError, RuntimeError) as error:
            why = f": {' '.join(str(error).split())[:160]}" if str(error) else ""
            raise ConfigError(f"{flag} {value} is invalid{why}", hint=f"give {flag} {takes}") from None


def check_script(options: argparse.Namespace) -> None:
    """Raise ``ConfigError`` if the script, or the program of ``--no-python``, does not exist here: no process could start."""
    script = options.training_script
    if options.module or options.run_path:
        return
    if options.no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"there is no program {script!r}", hint="without --no-python, a Python script is started")
        return
    path = Path(script)
    if path.is_file() or (path.is_dir() and (path / "__main__.py").exists()):
        return
    if path.is_dir():
        raise ConfigError("the script is a directory without a __main__.py", where=script, hint="name a script in it")
    with contextlib.suppress(OSError):
        names = [entry.name for entry in islice(path.parent.iterdir(), 1000) if entry.suffix in (path.suffix, ".py")]
        if close := get_close_matches(path.name, names, n=1, cutoff=0.7):
            raise ConfigError("there is no such script", where=script, hint=f"did you mean {path.parent / close[0]}?")
    raise ConfigError("there is no such script", where=script, hint=f"paths begin at {Path.cwd()}")


def _of_values(read: Callable[[], T]) -> T:
    """Return the result of ``read``, which reads the values of torchrun's flags.

    ``ConfigError`` if torchrun refuses a value: it does so by ``ValueError`` and ``AssertionError``, mostly without the
    flag's name.
    """
    try:
        return read()
    except (ValueError, AssertionError) as error:
        words = str(error) or "a count is below 1"
        hint = "--nnodes MIN:MAX or N, --nproc-per-node N, cpu, gpu or auto, --rdzv-conf KEY=VALUE,…"
        raise ConfigError(f"a flag of torchrun has an invalid value: {words[:200]}", hint=hint) from None


def _usual_rendezvous(options: argparse.Namespace) -> None:
    """Set the rendezvous as torchrun does for ``--standalone``, and for one node without an endpoint."""
    alone = options.rdzv_backend == "static" and not options.rdzv_endpoint and options.master_port is None
    if options.standalone or (alone and torchrun.parse_min_max_nnodes(options.nnodes)[1] == 1):
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if options.master_port is None:
        options.master_port = 29500


def _run(
    config: LaunchConfig,
    command: str,
    arguments: list[str],
    supervisor: Supervisor,
    spares: Spares,
    grace_s: float,
    secret: bytes,
    keeps_logs: bool,
) -> JobEnd:
    log = supervisor.recovery.log
    config.run_id = config.run_id or str(uuid.uuid4())
    signals = getattr(config, "signals_to_handle", _SIGNALS)
    handled = [name for name in signals.split(",") if not (name.strip() == "SIGHUP" and _is_ignored("SIGHUP"))]  # nohup
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(handled)
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    master, port = _static(parameters) if parameters.max_nodes > 1 else (None, None)
    try:
        patience_s = parameters.get_as_int("join_timeout", JOIN_S) or JOIN_S
        meeting = Meetings(parameters, secret)
        joining = Joining(meeting.handler, patience_s, meeting.seen)
    except Forged as error:
        return JobEnd(1, f"stopped: {error}", log.where)
    except LOST:
        closes = False  # the other nodes may still be waiting in it
        return JobEnd(1, f"stopped: the rendezvous at {config.rdzv_endpoint} does not answer", log.where)
    spec = WorkerSpec(
        role=config.role, local_world_size=config.nproc_per_node, entrypoint=command, args=tuple(arguments),
        rdzv_handler=joining, max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval, master_addr=master, master_port=port, local_addr=config.local_addr,
        **{name: getattr(config, name) for name in _NEWER_OPTIONS if hasattr(config, name)},
    )  # fmt: skip
    departing = Departing(config.min_nodes)
    agent = SupervisedAgent(
        spec=spec, logs_specs=config.logs_specs or DefaultLogsSpecs(), start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template, grace_s=grace_s,
        shutdown_timeout=getattr(config, "shutdown_timeout", None),
        supervisor=supervisor, spares=spares, joining=joining, departing=departing, signals=handled, keeps_logs=keeps_logs,
    )  # fmt: skip
    closes = True
    try:
        result = agent.run()
        events.record(agent.get_event_succeeded(), getattr(config, "event_log_handler", "null"))
        if result is None:
            return JobEnd(1, "stopped: the other nodes have ended the job without this one", log.where)
        if not result.is_failed():
            return JobEnd(0, "finished")
        decision = supervisor.recovery.decision
        if decision is not None and decision.action == "end":
            return _run_requested(supervisor, decision.reason)
        if decision is not None and decision.action == "exclude_node":
            closes = False  # the other nodes may continue, and another machine may replace this one
            return JobEnd(LEFT, f"this machine has left the job: {decision.reason}", log.where)
        return JobEnd(1, f"stopped: {decision.reason}" if decision is not None else "stopped", log.where)
    except RendezvousClosedError:
        return JobEnd(
            1, "stopped: another node has ended the job; the output of its relight run has the reason", log.where
        )
    except EndedElsewhere as error:
        closes = False  # the rendezvous has ended
        return JobEnd(1, f"stopped: another node has ended the job: {error}", log.where)
    except RendezvousTimeoutError:
        supervisor.end_without_failure("stop", why := f"fewer than {config.min_nodes} nodes came in time")
        return JobEnd(1, f"stopped: {why}", log.where)
    except Forged as error:
        closes = False  # the job's real nodes may be waiting in it
        supervisor.end_without_failure("exclude_node", str(error))
        return JobEnd(1, f"stopped: {error}", log.where)
    except LOST:
        closes = False  # the other nodes may still be waiting in it
        supervisor.end_without_failure(
            "exclude_node", why := f"the rendezvous at {config.rdzv_endpoint} can no longer be reached"
        )
        return JobEnd(1, f"stopped: {why}", log.where)
    except SignalException as signalled:
        closes = False  # a closed rendezvous could not be joined again
        name = signalled.sigval.name
        within(supervisor.end.left_s, lambda: supervisor.ended(name), None)
        left_s = max(0.0, grace_s - departing.since_s) if grace_s else SERVE_S
        joining.leave(config.rdzv_endpoint, continues := departing.others_continue(), left_s)
        suffix = "; the other nodes continue" if continues else ""
        return _run_requested(supervisor, supervisor.announced or f"{name} came", suffix)
    finally:
        if closes:
            joining.shutdown()


def _is_ignored(name: str) -> bool:
    """Return whether this process was started with that signal ignored."""
    return name in signal.Signals.__members__ and signal.getsignal(signal.Signals[name]) is signal.SIG_IGN


def _run_requested(supervisor: Supervisor, why: str, others: str = "") -> JobEnd:
    if supervisor.drains:
        return JobEnd(LEFT, f"this machine has left the job: {why}", supervisor.recovery.log.where)
    beats = supervisor.incarnation.beats().values()
    if within(supervisor.end.left_s, lambda: supervisor.incarnation.is_stored(supervisor.account.reached), False):
        stored = (
            "the last step is stored"
            if any(beat.steps for beat in beats)
            else "no step was completed here, so none is lost"
        )
        return JobEnd(SAVED, f"ended as requested: {why}; {stored}{others}")
    if beats and all(0 <= beat.step <= beat.sealed for beat in beats):
        stored = "the last step is not stored yet; the process that saves has it, and may still store it"
    else:
        stored = "the last step is not stored, the checkpoint before it stands"
    return JobEnd(UNSAVED, f"ended as requested: {why}; {stored}")


def _static(parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    if parameters.backend != "static":
        return None, None
    host, _, port = parameters.endpoint.strip().rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            "a static rendezvous needs the address of node 0", hint="add --master-addr HOST --master-port PORT"
        )
    return host, int(port)
