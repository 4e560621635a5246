"""The registry of all settings: name, kind, default, purpose. Commands, checks and the reference are generated from it.
Data only."""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

TABLES = ("checkpoint", "supervise", "alerts", "environment")
"""The tables of ``relight.toml``."""
PREFIX = "RELIGHT_"


class Setting(NamedTuple):
    """One setting. ``name`` is its table and key in the file."""

    name: str
    kind: str
    """Allowed values, in words."""
    default: str
    """The default, in words, because some defaults are computed."""
    doc: str
    argument: str = ""
    """The equivalent keyword argument or flag, if there is one in addition to ``--set``."""
    secret: bool = False
    """Whether its value is never shown."""

    @property
    def variable(self) -> str:
        """The equivalent environment variable."""
        return variable_of(self.name)


_SHORT = {"checkpoint.background": "RELIGHT_BACKGROUND", "supervise.grace_s": "RELIGHT_GRACE_S"}
"""Variables with names from before the naming scheme."""
PROCESS_VARIABLES = (
    "RELIGHT_SETTINGS", "RELIGHT_HEARTBEAT", "RELIGHT_STACKS", "RELIGHT_BEFORE", "RELIGHT_SKIP", "RELIGHT_LR_CUT", "RELIGHT_SPLIT",
    "RELIGHT_SPIKES",
)  # fmt: skip
"""Variables that are not settings of the file: one names the file, ``relight run`` sets the others for the processes it
starts."""
_PROTECTION = (
    "job_secret", "key", "sign", "trust", "anchor", "audit", "core_dumps", "single_writer", "keys_over_http", "peers_host",
    "events", "cache",
)  # fmt: skip
NAMED_ONLY = frozenset(
    {*(f"environment.{name}" for name in _PROTECTION), "supervise.recordings", "supervise.model", "checkpoint.tiers"}
)
"""Settings for security, and paths that are read, written and cleaned up. They count only in a named file, not in a
file that happens to be in the working directory."""


def variable_of(name: str) -> str:
    """Return a setting's variable: prefix and name in capitals, ``__`` for each dot. For ``environment.cache`` it is
    ``RELIGHT_CACHE``."""
    if name in _SHORT:
        return _SHORT[name]
    table, _, rest = name.partition(".")
    return PREFIX + (rest if table == "environment" else name).replace(".", "__").upper()


_MAKERS = {
    "adaptive": "adaptive",
    "every": "every",
    "keep": "keep",
    "limits": "Limits",
    "compact": "Compact",
    "peers": "Peers",
}
_TIME, _SIZE, _COUNT, _YES = (
    'a time: "36h", or seconds',
    'a size: "500GB", or bytes',
    "a whole number from 1 up",
    "true or false",
)
_SECONDS, _RATE = "seconds", "bytes a second"


def _argument_settings(table: str, *rows: tuple[str, str, str, str]) -> tuple[Setting, ...]:
    """Arguments of the function that ``[checkpoint.table]`` is named for."""
    return tuple(
        Setting(f"checkpoint.{table}.{name}", kind, default, doc, f"{_MAKERS[table]}({name}=)")
        for name, kind, default, doc in rows
    )


_CHECKPOINT = (
    Setting(
        "checkpoint.background",
        _YES,
        "true",
        "whether the agent writes while training continues",
        "Checkpointer(background=)",
    ),
    Setting(
        "checkpoint.takeover",
        '"ask", "refuse" or "take"',
        "refuse, unless a launcher restarts",
        "what a start does if another process still trains its run",
        "Checkpointer(takeover=)",
    ),
    *_argument_settings(
        "adaptive",
        ("at_least", _TIME, "none", "the shortest interval between saves"),
        ("at_most", _TIME, "1h, or 100 times a save's cost", "the longest"),
        ("overhead", "a share between 0 and 1", "0.5", "what share of the steps' time saves may take"),
        ("total_steps", _COUNT, "not known", "how many steps there will be"),
        ("mtbf", _TIME, "published rates", "the time between failures of this job"),
        ("loss", "a metric's name", "none", "the metric; volatile values make saves more frequent"),
        ("drop", "a share between 0 and 1", "none", "by how much the loss must fall for the next save to come earlier"),
        ("bytes_per_second", _RATE, "no bound", "limit of the bytes that saves write to the store"),
        (
            "phases",
            "a table of names and factors",
            "none",
            "the factor of the interval in each phase that ckpt.phase names",
        ),
        ("busy", "a table: disk, device", "none", "the share of use above which the interval is twice as long"),
    ),
    *_argument_settings(
        "every",
        ("steps", _COUNT, "never", "save after every n steps"),
        ("minutes", "a number above 0", "never", "save n minutes after the last save"),
        ("hours", "a number above 0", "never", "the same in hours; hours, minutes and seconds add up"),
        ("seconds", "a number above 0", "never", "the same in seconds"),
        ("epochs", _COUNT, "never", "save at the end of every n training epochs"),
        ("loader", "a component's name", "the only loader", "the loader that epochs are counted by"),
    ),
    *_argument_settings(
        "keep",
        ("last", _COUNT, "no rule", "the newest n"),
        ("best", _COUNT, "no rule", "the best n, by metric"),
        ("metric", "a metric's name", "the run's own", "the metric of best"),
        ("mode", '"min" or "max"', "by the name", "whether less or more of it is better"),
        ("every", _COUNT, "no rule", "one for each multiple of n steps: the first at or after it"),
        ("within", _TIME, "no rule", "those within this time of the newest"),
        ("hourly", _COUNT, "no rule", "the newest of each of n hours"),
        ("daily", _COUNT, "no rule", "the newest of each of n days"),
        ("weekly", _COUNT, "no rule", "the newest of each of n weeks"),
        ("monthly", _COUNT, "no rule", "the newest of each of n months"),
        ("budget", _SIZE, "no rule", "the newest that fit into it"),
        ("lag_steps", _COUNT, "no rule", "one that is n steps older than the newest"),
        ("undo_window", _TIME, "not at all", "how long a removed checkpoint can be brought back"),
        ("prune_abandoned", _YES, "false", "whether checkpoints that the newest good one does not descend from may go"),
    ),
    *_argument_settings(
        "limits",
        ("memory", "bytes", "what is there", "shared memory for snapshots, all slots together"),
        ("threads", _COUNT, "2", "number of threads that hash and copy"),
        ("bytes_per_second", _RATE, "no bound", "limit for all ranks of a node together: writes"),
        ("read_bytes_per_second", _RATE, "no bound", "limit for all ranks of a node together: reads, as in a restore"),
        ("nice", "a whole number from 0 up", "10", "the agent's niceness"),
        ("when_busy", '"newest" or "queue"', "newest", "what becomes of a save that is due while no slot is free"),
        ("deadline_s", _SECONDS, "600", "the longest wait for the agent"),
    ),
    *_argument_settings(
        "compact",
        ("reuse", _YES, "true", "whether a chunk that an earlier save has is not stored again"),
        ("codecs", '"auto", "never" or "always"', "auto", "whether chunks are compressed"),
        ("full_every", _COUNT, "left to retention", "one in this many saves stores everything itself"),
        ("trust_versions", _YES, "false", "whether frozen parameters are known by their version counters"),
        ("lossy", "a table of patterns and ways", "none", "which tensors are stored inexactly, and how"),
        (
            "max_error",
            "a table of patterns and bounds",
            "none",
            'the largest error of values stored inexactly: 1e-4, or "0.1%"',
        ),
        ("plugin_codecs", "a table of patterns and codecs", "none", "codecs of other packages, by names of tensors"),
        ("coder", '"cpu" or "gpu"', "cpu", "who codes: nvCOMP on the GPU where it is there"),
        (
            "level",
            "a whole number from 1 to 19",
            "the fastest",
            "zstd's level: higher ones take more time and store less",
        ),
    ),
    *_argument_settings(
        "peers",
        ("copies", "a whole number from 1 to 4", "none", "how many other nodes hold each node's snapshot whole"),
        ("data", "a whole number from 1 to 32", "1", "how many nodes a snapshot's pieces are spread over"),
        ("parity", "a whole number from 1 to 4", "1", "how many nodes of data + parity may be lost"),
        ("memory", _SIZE, "what is there", "memory that a node uses for other nodes' snapshots"),
        ("bytes_per_second", _RATE, "no bound", "limit of the bytes that a node sends"),
    ),
    Setting(
        "checkpoint.tiers",
        "a table for each further store, near to far",
        "none",
        "where checkpoints are copied to: url, and the arguments of tier()",
        "Checkpointer(Tiers(…))",
    ),
)


def _table_settings(table: str, *rows: tuple[str, str, str, str]) -> tuple[Setting, ...]:
    return tuple(Setting(f"{table}.{name}", kind, default, doc) for name, kind, default, doc in rows)


_SUPERVISE = _table_settings(
    "supervise",
    ("failures", _COUNT, "10", "failures in a row without a step of progress that are allowed: the next one stops it"),
    ("same", _COUNT, "3", "failures that are alike, at the same step, until it stops"),
    ("backoff_s", _SECONDS, "1.0", "the first wait before another try; it doubles"),
    ("backoff_max_s", _SECONDS, "60.0", "the longest"),
    ("roll_backs", _COUNT, "3", "how often it goes back to before one onset"),
    ("node_failures", _COUNT, "3", "failures of its hardware within a day after which a machine leaves"),
    ("skip", _COUNT, "1", "number of steps to skip after a rollback, with their samples"),
    ("lr_cut", "a number above 0, at most 1", "1.0", "factor for the learning rates at each rollback"),
    ("split", _YES, "false", "whether micro-batches may be made smaller"),
    (
        "spikes",
        "a number from 0 to 86400",
        "10.0",
        "standard deviations above the median from which a loss counts as a spike",
    ),
    ("start_s", _SECONDS, "900.0", "how long is waited for the first step"),
    ("phase_s", _SECONDS, "900.0", "how long is waited for a phase that was never seen"),
    ("spares", _YES, "true", "whether spare processes wait to replace ranks"),
    ("preload", "a list of modules", "none", "what the spares import in addition to torch and Relight"),
    ("grace_s", _SECONDS, "not known", "from SIGTERM to SIGKILL, when the machine is wanted back"),
    ("notices", "a list of aws, gcp, azure, addresses", "none", "sources of the cloud's preemption notices"),
    ("predict", _YES, "true", "whether the node is monitored each second to predict failures"),
    ("model", "a path", "rules alone", "a file of relight predict train"),
    ("recordings", "a path", "nowhere", "a directory for the recorded measurements"),
    (
        "pause",
        "a share from 0 to 0.9",
        "0.2",
        "share of the time that ranks pause while this node is too hot or under pressure",
    ),
    ("lower_power", _YES, "false", "whether accelerators' power limits are lowered under heat"),
    ("drain", _YES, "false", "whether a machine leaves the job if its device is about to fail"),
)
RULES = {
    "no_good_checkpoint": ("after_s", "3600", "critical", "0"),
    "saves_failing": ("count", "3", "critical", "0"),
    "slow_save": ("above_s", "600", "warning", "0"),
    "tier_full": ("above", "0.9", "warning", "0"),
    "tier_behind": ("above_s", "3600", "warning", "0"),
    "damaged": ("above", "0", "critical", "0"),
    "risk": ("above", "0.8", "warning", "0"),
    "job_given_up": ("count", "1", "critical", "0"),
    "node_excluded": ("count", "1", "warning", "0"),
    "rolled_back": ("count", "1", "warning", "0"),
    "hardware_failure": ("count", "1", "warning", "0"),
    "crash_loop": ("count", "3", "critical", "0"),
    "retention_blocked": ("count", "3", "warning", "0"),
    "unreadable": ("", "", "warning", "60"),
}
"""Of each kind of alert: the word for its number, and the defaults of that, of severity and of ``for_s``."""


def _rule(name: str) -> tuple[Setting, ...]:
    limit, number, severity, for_s = RULES[name]
    rows = [
        ("severity", "info, warning or critical", severity, "severity of the alert"),
        ("for_s", _SECONDS, for_s, "how long it must hold"),
        ("runs", "a list of patterns", "all", "which runs it is for"),
        ("enabled", _YES, "true", "whether the rule is evaluated"),
    ]
    return _table_settings(
        f"alerts.rules.{name}",
        *([(limit, "a number from 0 up", number, "beyond which it holds")] if limit else []),
        *rows,
    )


_ALERTS = (
    Setting("alerts.to", "a list of addresses, env:NAME, file:PATH", "none", "where alerts are sent", secret=True),
    Setting(
        "alerts.escalate_to",
        "a list of addresses",
        "none",
        "where alerts are sent as well if they persist",
        secret=True,
    ),
    *_table_settings(
        "alerts",
        ("min_severity", "info, warning or critical", "warning", "the least severity that is sent"),
        ("group_s", _SECONDS, "30", "how long an alert waits for others, to be sent together"),
        ("repeat_s", _SECONDS, "14400", "after which an alert is sent again; 0: never"),
        ("escalate_after_s", _SECONDS, "1800", "after which a critical alert is also sent to escalate_to"),
        ("quiet", 'a list of times: "22:00-07:00"', "never", "when only critical alerts are sent"),
        ("timezone", "a name: Europe/Berlin", "UTC", "time zone of quiet"),
    ),
    *(setting for name in RULES for setting in _rule(name)),
)
_ENVIRONMENT = (
    *_table_settings(
        "environment",
        ("events", "a directory, or 0", "a private one", "where processes keep their events; 0: nowhere"),
        ("node", "a name", "the host's", "which node this is, where one machine counts as several"),
        ("rack", "a name", "none", "what this node may be lost together with"),
        ("peers_host", "an address", "where routes lead from", "where this node's agent listens to peers"),
        ("store_patience_s", _SECONDS, "120, of commands 20", "how long an object store may take to answer"),
        ("cache", "a directory", "no cache", "where data read from remote stores is cached"),
        ("cache_bytes", _SIZE, "a tenth of what is free", "how much of it"),
        ("lossy", "PATTERN=WAY, parted by spaces", "nothing", "tensors to store inexactly, which overrides the script"),
    ),
    Setting(
        "environment.key",
        "specs: file:PATH, env:NAME",
        "none",
        "where keys are that open and encrypt",
        "encrypt=",
        secret=True,
    ),
    Setting("environment.sign", "a spec: ed25519:file:PATH", "none", "who signs records", "sign=", secret=True),
    Setting("environment.trust", "specs: ed25519:PUBLIC KEY", "all", "public keys with accepted signatures", "trust="),
    Setting(
        "environment.job_secret",
        "a spec: file:PATH, or none",
        "one node needs none",
        "what the nodes of a job share",
        secret=True,
    ),
    Setting("environment.anchor", "a store", "none", "where the end of each log is recorded", "anchor="),
    *_table_settings(
        "environment",
        ("audit", "a store", "none", "where the audit log is written"),
        ("core_dumps", _YES, "false", "whether processes that hold keys may leave core dumps"),
        ("single_writer", _YES, "false", "a promise: one process at most writes to the store"),
        ("keys_over_http", _YES, "false", "whether key services on other machines may be asked without TLS"),
        ("debug", _YES, "false", "whether commands show tracebacks"),
        (
            "log",
            "quiet, warnings, default, info or debug",
            "default",
            "which events go to stderr if no logging is configured",
        ),
    ),
)
SETTINGS = {setting.name: setting for setting in (*_CHECKPOINT, *_SUPERVISE, *_ALERTS, *_ENVIRONMENT)}
"""All settings by name, in the order in which they are shown."""
VARIABLES = {setting.variable: setting for setting in SETTINGS.values()}


def nearest(name: str) -> str:
    """Return the setting that was likely meant; empty if none is similar. The part after the last dot is compared
    first, in its table."""
    table, _, key = name.rpartition(".")
    siblings = {setting.removeprefix(f"{table}.") for setting in SETTINGS if setting.startswith(f"{table}.")}
    tables = {setting.rpartition(".")[0] for setting in SETTINGS} | {"alerts.rules"}
    matches = get_close_matches(key, {sibling.partition(".")[0] for sibling in siblings}, 1, 0.6)
    if matches and table:
        return f"{table}.{matches[0]}"
    matches = get_close_matches(name, [*SETTINGS, *sorted(tables)], 1, 0.7)
    return matches[0] if matches else ""


def nearest_variable(name: str) -> str:
    """Return the environment variable that was likely meant; empty if none is similar."""
    matches = get_close_matches(name, [*VARIABLES, *PROCESS_VARIABLES], 1, 0.75)
    return matches[0] if matches else ""
