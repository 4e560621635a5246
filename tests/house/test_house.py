"""The house rules of the source that no linter knows."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from tree import ENGINES, SOURCES, TESTS, rel

import relight

BROAD_MAY_STAND = {
    "comm/new_threads.py": "what a task raises is kept for the caller that asks for its result",
    "agent/server.py": "one trainer's error is not another's: it is reported, and the process continues",
    "peers/sender.py": "a part that cannot be sent for any reason is reported, and the next one is sent",
    "agent/slot_writer.py": "a save that fails in any way is reported to its trainer",
    "format/chunk_codecs.py": "another package's codec may raise anything when it is loaded: its name is reported if it is needed",
    "commit/nvcomp.py": "a driver's, a library's: processors code then, and the choice has the reason",
    "checkpointer/lost_workers.py": "an ending after the script's uncaught error: an event, so that the first error's traceback is still printed",
    "checkpointer/metric_values.py": "a metric has the script's own type, and reading it may raise anything; no save fails for it",
    "ranks/collective_errors.py": "other ranks wait for the error: it is sent to them, and raised again",
    "ranks/remote_errors.py": "other ranks wait for the error, which cannot be encoded: its type is sent",
    "monitoring/loop.py": "one failed poll must not end all later alerts: it is reported",
    "ranks/gather.py": "other ranks wait for an answer, or for one to be received: the error is sent to them, or raised after that",
    "ranks/one_writer.py": "rank 0 waits for this rank's description: the error is sent to it, and raised again",
    "ranks/several.py": "other ranks wait for the error: it is sent to them, and raised again",
    "checkpointer/leaving.py": "the caller's exception counts more than a save that fails after it: an event",
    "checkpointer/save_loop.py": "the trainer's edge: event, counter, warning",
    "supervise/prediction_thread.py": "a driver's library may raise anything: an event, and the job continues without predictions",
    "integrations/trackers/tracker.py": "a tracker may raise anything: rows are kept, and training continues",
    "errors.py": "repr of a value failed: an error's message is made without it",
    "checkpointer/outside_state.py": "another object's state_dict, asked for a report only",
    "checkpointer/signals.py": "what the script's own signal handler raises: raised again after the save",
    "checkpointer/handover.py": "another error is being raised: this one is reported, and the other one continues",
    "capture/loaders.py": "a data set may raise anything: the batch is counted, and the error raised again",
    "capture/reposition.py": "a data set may raise anything: a batch that the loop left out is left out again; the position is kept",
    "observe/events.py": "a subscriber may raise anything: it is logged once, and the save or the training continues",
    "capture/restore_plan.py": "load_state_dict of another library: kept as the cause",
    "capture/own_loading.py": "a class's loading code, tried on a copy: what it raises means that it takes no such tensor",
    "capture/restore_optimizer.py": "an optimizer's step or state_dict, tried on a copy: reported as a mismatch",
    "store/object_client.py": "a library's errors are of any kind: made ours, without what may be secret",
    "store/object_writer.py": "an upload's own thread: kept, and raised where the writer is",
    "store/objects.py": "a library's errors are of any kind: made ours",
    "store/plugins.py": "another distribution may raise anything: made ours, with its name",
    "serve/jobs.py": "whatever a job raises is its client's answer",
    "serve/tasks.py": "one asker's entry that fails does not stop the others': raised after them",
    "supervise/rendezvous_thread.py": "torch's rendezvous, asked in a thread: kept, and raised where it was asked",
    "supervise/worker.py": "the script's own error: written down, printed, and it ends the process",
    "supervise/spare.py": "an import that the script may not even need: reported, and left to the script",
    "monitoring/notify.py": "a plug-in of apprise may fail in any way: reported by its kind, and the next target is tried",
    "testing/codec_suite.py": "another package's codec may raise anything: the suite's test fails with it",
    "observe/object_view.py": "a debugger shows objects that are half made",
    "followers/follower.py": "an error of one check, also of the caller's map=: kept in `error`, and the thread continues",
    "cli/__init__.py": "the outermost edge of a command: a traceback and exit code 2",
}


@pytest.mark.parametrize(
    "command", [["-c", "import relight"], ["-m", "relight", "--help"], ["-m", "relight", "ls", "--help"]], ids=str
)
def test_start_without_torch_and_with_few_modules(command: list[str]) -> None:
    """``import relight`` and commands start without torch, numpy and rich.

    The limit is a count of modules, not seconds.
    """
    script = "import sys, atexit; atexit.register(lambda: print('MODULES', len(sys.modules), sorted({'torch', 'numpy', 'rich'} & set(sys.modules))))\n"
    if command[0] == "-c":
        script += command[1]
    else:
        script += f"import runpy; sys.argv = {['relight', *command[2:]]!r}; runpy.run_module('relight', run_name='__main__', alter_sys=True)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    line = next(line for line in done.stdout.splitlines() if line.startswith("MODULES"))
    assert line.endswith("[]"), line
    assert int(line.split()[1]) < 450, line


def test_public_names_are_pinned() -> None:
    """A new public name is a decision, not an accident; each can be imported."""
    assert relight.__all__ == [
        "Checkpoint", "CheckpointNotFound", "Checkpointer", "Compact", "ConfigError", "CorruptCheckpoint", "Diverged", "Duration", "Fenced",
        "Follower", "IncompatibleState", "InternalError", "LazyCheckpoint", "LeaseHeld", "Limits",
        # if a new name is meant, add it here, to a page of docs/api and to the changelog
        "NewerFormat", "NoMemory", "NoSpace", "Peers", "Rate", "RelightError", "ReplicasDiffer", "RunRemoved", "RunReplaced", "Save", "SaveFailed", "Size",
        "Store", "StoreUnavailable", "Tiers", "Trigger", "TriggerInput", "UnsafeContent", "WrongKey", "adaptive", "best",
        "every", "failure_policy", "flattened", "follow", "keep", "load", "open", "phase", "save", "standby", "tier",
    ]  # fmt: skip
    assert all(getattr(relight, name) for name in relight.__all__)


FORBIDDEN = ("pickle", "marshal", "shelve", "yaml", "dill", "cloudpickle", "joblib", "code", "codeop")
EXECUTES: dict[tuple[str, str], str] = {
    (
        "integrations/dcp_read.py",
        "torch.save",
    ): "DCP's planner takes values as torch.save'd bytes alone: made in memory, from plain values",
    ("integrations/engines.py", "pickle"): "SGLang takes tensors as a pickle alone: written, never read",
}
"""Permitted uses: (file, name) and the reason."""


def test_every_test_states_its_rule() -> None:
    """Each test function has a docstring."""
    silent = []
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name.startswith("test_")
                and not ast.get_docstring(node)
            ):
                silent.append(f"{path.name}: {node.name}")
    assert silent == []


def test_every_source_file_has_a_docstring_and_stays_small() -> None:
    """A first line, and at most 700 lines of 120 columns."""
    for path in [*SOURCES, *ENGINES]:
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), rel(path)
        assert text.count("\n") <= 700, rel(path)


def calls_of_danger(tree: ast.AST) -> list[str]:
    """Return imports, calls and arguments that could run data as code, or a command line in a shell."""
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            uses += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN:
            uses.append(node.module or "")
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.rpartition(".")[2]
            first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if name.removeprefix("builtins.") in ("eval", "exec", "__import__"):
                uses.append(name)
            if name in (
                "os.system",
                "os.popen",
                "torch.load",
                "torch.save",
                "subprocess.getoutput",
                "subprocess.getstatusoutput",
            ):
                uses.append(name)
            if last == "import_module" and isinstance(first, str) and first.split(".")[0] in FORBIDDEN:
                uses.append(f"import_module({first!r})")
            for word in node.keywords:
                if word.arg in ("shell", "allow_pickle") and getattr(word.value, "value", True):
                    uses.append(f"{word.arg}=")
    return uses


def test_nothing_in_the_source_can_execute_data() -> None:
    """No pickle, marshal, eval, exec, yaml, shell or torch.load anywhere in the product or its proofs, except for listed
    uses with reasons."""
    uses = {(rel(path), what) for path in [*SOURCES, *ENGINES] for what in calls_of_danger(ast.parse(path.read_text()))}
    assert uses - EXECUTES.keys() == set()
    assert EXECUTES.keys() - uses == set(), "the list has entries without a use"


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from marshal import loads", "builtins.eval(x)", "run(x, shell=True)", "numpy.load(f, allow_pickle=flag)", "torch.load(f)",
     "import_module('dill')", "os.system(x)", "import yaml.nodes"],
)  # fmt: skip
def test_the_search_for_execution_finds_it(line: str) -> None:
    """Each kind of unsafe use is detected."""
    assert calls_of_danger(ast.parse(line))


def modules_imported(tree: ast.AST) -> set[str]:
    """Return the modules that the source imports, at its top or in a function."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_the_package_imports_no_proof_engine() -> None:
    """No module of the package imports ``proofs``, which is not in the wheel. Most proofs import ``relight.testing``."""
    imports = {rel(path): modules_imported(ast.parse(path.read_text())) for path in [*SOURCES, *ENGINES]}
    using = {path for path, names in imports.items() if any(name.split(".")[0] == "proofs" for name in names)}
    assert {path for path in using if not path.startswith("proofs/")} == set()
    assert {"proofs/crash.py", "proofs/mutation_check.py"} <= using, "the search finds nothing"


def test_broad_excepts_stand_only_at_the_edge() -> None:
    """Each place that catches any exception is on a short list with its reason."""
    result = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                kinds = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
                named = [getattr(kind, "id", "") for kind in kinds if kind is not None]
                raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                if node.type is None or "Exception" in named or ("BaseException" in named and not raises):
                    result.add(rel(path))
    assert {path for path in result if not path.startswith("demo/")} == BROAD_MAY_STAND.keys()
