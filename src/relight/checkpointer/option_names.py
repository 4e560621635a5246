"""Keywords that are not options of a Checkpointer: which option was meant.

Every keyword that is not an option names a component, so a misspelt option would be saved as one and never take effect. A value that has
no state of its own is therefore refused under a keyword, and so is a container with a name that is one typing error from an option
that takes such a container. ``state={…}`` takes any name and any plain value: nothing is guessed there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from enum import Enum

from relight.capture import is_component
from relight.checkpointer.failure_policy import FailurePolicy
from relight.errors import ConfigError, shown
from relight.policy import Compact, Keep, Limits, Peers, Tier, Tiers, Trigger

_STEPS, _TIME = "save=relight.every(steps=…)", "save=relight.every(minutes=…)"
_EPOCHS = "save=relight.every(epochs=…)"
_LAST, _BEST, _EVERY = (
    "keep=relight.keep(last=…)",
    'keep=relight.keep(best=…, metric="…")',
    "keep=relight.keep(every=…)",
)
_METRIC = 'save=relight.best("…") and keep=relight.keep(best=1, metric="…")'
_PATH, _NAME = (
    'the first argument: Checkpointer("runs/demo", …)',
    'run="…", or the last part of the path: Checkpointer("runs/demo", …)',
)
_RESUME, _END = (
    "a call, start = ckpt.restore(), after the Checkpointer is made",
    "close(), which saves the last step by itself",
)
_BACKGROUND = "background=True, which is the default; background=False waits for each save"
_FAILURE = 'on_failure="warn", "retry" or "raise"'
_CALL, _LIMITS, _META = "an argument of ckpt.step() or ckpt.save()", "limits=relight.Limits(…)", "metadata={…}"
_RANKS = "nothing to set: ranks are found by torch.distributed"
_MEANT: dict[str, str] = {
    **dict.fromkeys((
        "save_every", "save_steps", "save_interval", "save_freq", "save_frequency", "save_period", "save_iters", "save_interval_steps",
        "save_every_n_steps", "every", "every_n_steps", "every_n_train_steps", "every_steps", "checkpoint_every", "checkpoint_interval",
        "checkpoint_frequency", "checkpointing_steps", "checkpoint_steps", "ckpt_interval", "ckpt_every", "ckpt_freq", "interval",
        "period", "frequency", "save_strategy", "steps", "trigger", "when", "save_on", "schedule",
    ), _STEPS),
    **dict.fromkeys(("train_time_interval", "save_minutes", "save_interval_minutes", "save_time_interval", "minutes", "hours", "seconds",
                     "interval_s", "interval_seconds", "save_interval_seconds"), _TIME),
    **dict.fromkeys(("every_n_epochs", "save_epochs", "save_every_epoch", "save_every_n_epochs", "save_interval_epochs"), _EPOCHS),
    **dict.fromkeys((
        "max_to_keep", "save_total_limit", "total_limit", "keep_last", "keep_last_n", "keep_latest", "keep_latest_k", "num_to_keep",
        "keep_checkpoint_max", "max_checkpoints", "max_keep", "max_saves", "num_checkpoints", "keep_n", "last", "retention", "n_saved",
    ), _LAST),
    **dict.fromkeys(("save_top_k", "top_k", "keep_best", "save_best", "save_best_only", "best_k", "best", "load_best_model_at_end"), _BEST),
    **dict.fromkeys(("keep_period", "keep_every", "keep_every_n_steps"), _EVERY),
    **dict.fromkeys(("monitor", "metric", "metric_name", "metric_for_best_model", "score_name", "score_function", "best_metric",
                     "checkpoint_score_attribute", "best_fn"), _METRIC),
    **dict.fromkeys(("mode", "greater_is_better", "best_mode", "checkpoint_score_order"), 'relight.best("…", mode="max")'),
    **dict.fromkeys((
        "dirpath", "output_dir", "checkpoint_dir", "checkpoint_path", "checkpoints_dir", "ckpt_dir", "save_dir", "save_path", "directory",
        "folder", "dir", "root", "root_dir", "default_root_dir", "logdir", "log_dir", "project_dir", "storage_path", "workdir", "work_dir",
        "url", "store", "base_path", "save_folder", "filepath", "tiers",
    ), _PATH),
    **dict.fromkeys(("filename", "name", "run_name", "experiment", "experiment_name", "prefix", "filename_prefix", "save_name", "exp_name"),
                    _NAME),
    **dict.fromkeys((
        "resume", "resume_from", "resume_from_checkpoint", "auto_resume", "ckpt_path", "restore", "restore_from", "load", "load_from",
        "load_path", "load_dir", "load_step", "init_from", "from_checkpoint", "weights_only", "strict", "only", "map", "map_location",
        "which",
    ), _RESUME),
    **dict.fromkeys(("save_last", "save_on_train_end", "save_on_train_epoch_end", "save_at_end", "save_final"), _END),
    **dict.fromkeys(("async_save", "async_", "is_async", "use_async", "async_checkpointing", "async_checkpoint", "async_mode",
                     "enable_async_checkpointing", "non_blocking", "blocking", "block", "wait"), _BACKGROUND),
    **dict.fromkeys(("on_error", "on_fail", "raise_on_error", "ignore_errors", "raise_on_failure", "fail_fast"), _FAILURE),
    **dict.fromkeys(("retries", "max_retries", "num_retries", "retry"), "on_failure=relight.failure_policy(retries=…)"),
    **dict.fromkeys(("handle_signals", "signal_handlers", "signal", "preemption", "save_on_preemption", "preemption_checkpoint"),
                    "signals=True, which is the default"),
    **dict.fromkeys(("threads", "num_threads", "thread_count", "memory", "nice", "timeout", "timeout_s", "timeout_secs", "deadline",
                     "deadline_s", "bytes_per_second", "read_bytes_per_second", "max_bandwidth"), _LIMITS),
    **dict.fromkeys(("compress", "compression", "codec", "codecs", "dedup", "incremental"), "compact=relight.Compact(…)"),
    **dict.fromkeys(("encryption", "encryption_key", "key", "password"), 'encrypt="file:PATH"'),
    **dict.fromkeys(("replicas", "replication", "replication_factor"), "peers=relight.Peers(copies=…)"),
    **dict.fromkeys(("meta", "meta_data", "user_metadata", "config", "cfg", "hparams", "hyperparameters", "args", "notes",
                     "description"), _META),
    **dict.fromkeys(("tag", "metrics", "samples", "micro_step", "reason", "global_step_transform"), _CALL),
    **dict.fromkeys(("rank", "local_rank", "world_size", "process_group", "is_main_process", "save_on_each_node"), _RANKS),
    **dict.fromkeys(("save_weights_only", "save_only_model", "save_optimizer"), "components: pass only what must be saved"),
    **dict.fromkeys(("verbose", "verbosity", "log_level", "quiet"), 'logging.getLogger("relight")'),
}  # fmt: skip
"""Other frameworks' names, and ours of other calls, and what each is here."""
_FITS: dict[str, type | tuple[type, ...]] = {
    "state": Mapping, "metadata": Mapping, "limits": Mapping, "compact": Mapping, "peers": Mapping,
    "per_rank": (list, tuple, set, frozenset), "encrypt": (list, tuple), "trust": (list, tuple),
}  # fmt: skip
"""Options that a container is likely meant for."""
_WORDS = frozenset({"stats", "states", "stage", "slate", "truss"})
"""Names of components that look like a slip, and are words."""
_OBJECTS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (Trigger, "save"), (Keep, "keep"), (Limits, "limits"), (Compact, "compact"), (Peers, "peers"), (FailurePolicy, "on_failure"),
)  # fmt: skip


def refuse_slip(name: str, value: object, options: Iterable[str]) -> None:
    """Raise ``ConfigError`` if a keyword that is not an option cannot be meant as a component.

    ``options``: the Checkpointer's own.
    """
    known = [option_name for option_name in options if option_name not in ("self", "components")]
    if isinstance(value, Mapping) and value.keys() == {"state", "param_groups"}:
        raise ConfigError(
            f"{name}= is the state_dict() of an optimizer: a copy, which a restore cannot put back into the optimizer",
            where=f"{name}=",
            hint=f"pass the optimizer itself: {name}={name}",
        )
    if is_component(value):
        option = next(
            (
                candidate
                for candidate in known
                if isinstance(value, _FITS.get(candidate, ())) and _one_slip(name, candidate)
            ),
            None,
        )
        if option is not None and name not in _WORDS:
            raise ConfigError(
                f"{name!r} is not an option, and would be saved as a component",
                where=f"{name}=",
                hint=f"did you mean {option}=? A component of that name goes into state={{{name!r}: …}}",
            )
        return
    if (value is None or isinstance(value, Enum)) and not _close(name, known):
        return  # None in this process, or a plain value of the caller's own class: not a misspelt option
    message = f"{name!r} is not an option, and {shown(value)} cannot be a component"
    raise ConfigError(message, where=f"{name}=", hint=_hint(name, value, known))


def _hint(name: str, value: object, known: list[str]) -> str:
    option = next((option for kind, option in _OBJECTS if isinstance(value, kind)), None)
    if isinstance(value, (Tier, Tiers)):
        return "did you mean the first argument? Checkpointer(relight.Tiers(…), …)"
    if option is not None:
        return f"did you mean {option}=?"
    if isinstance(value, Iterator):
        return f"pass the object that it iterates over: {name}={'loader' if name == 'data' else name}"
    meaning = meaning_of(name)
    if meaning:
        return f"in Relight that is {_with_number(meaning, value)}"
    close = _close(name, known)
    if close in known:
        return f"did you mean {close}=?"
    if isinstance(value, type):
        return f"pass an object, not its class: {name}={value.__name__}(…)"
    if close:
        return f"did you mean {close!r}? In Relight that is {_with_number(_MEANT[close], value)}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return f"a plain value that changes goes into state={{{name!r}: {shown(value)}}}, one that describes the run into metadata={{…}}"
    return "a component is a module, optimizer, loader, generator, tensor, array, container, or has state_dict() and load_state_dict()"


def _close(name: str, known: list[str]) -> str:
    """Return the option, of Relight's or another framework's, that ``name`` is or may have been meant for; empty if there is none."""
    if meaning_of(name):
        return name
    return next(iter(get_close_matches(name.lower(), [*known, *_MEANT], 1, 0.82)), "")


def _with_number(meant: str, value: object) -> str:
    """Return the answer with the caller's own number in it, if the answer has a place for one."""
    return meant.replace("=…", f"={value}", 1) if type(value) is int and value > 0 else meant


def meaning_of(name: str) -> str:
    """Return what another framework's option is called here; empty if unknown.

    Case, hyphens and underscores are ignored.
    """
    return _PLAIN.get(_plain(name), "")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


_PLAIN = {_plain(name): meant for name, meant in _MEANT.items()}


def _one_slip(typed: str, meant: str) -> bool:
    """Return whether the texts differ by one missing, extra or wrong letter, or by two swapped neighbours."""
    if typed == meant or abs(len(typed) - len(meant)) > 1:
        return False
    start = next(
        (index for index, (typed_letter, meant_letter) in enumerate(zip(typed, meant)) if typed_letter != meant_letter),
        min(len(typed), len(meant)),
    )
    a, b = typed[start:], meant[start:]
    if len(a) == len(b):
        return a[1:] == b[1:] or (a[2:] == b[2:] and a[:2] == b[:2][::-1])
    return a[1:] == b or a == b[1:]
