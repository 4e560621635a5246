"""``relight follow``: run a command for each new checkpoint of a run, and record its results."""

from __future__ import annotations

import json
import shutil
import sys

import click

from relight.cli.common import json_option
from relight.cli.followed import follow_options, followed
from relight.cli.output import escape, warn
from relight.errors import ConfigError
from relight.followers.evaluation import Evaluation, RecordedResult, default_name, record
from relight.followers.run_command import words_of
from relight.log import Checkpoint
from relight.log.identity import check_recordable
from relight.run_records.results import check_evaluation_name, results_of
from relight.settings.amounts import seconds_of
from relight.units import duration_text, metrics_text


@click.command("follow")
@click.argument("path", metavar="RUN")
@click.option(
    "--run", "command_line", required=True, metavar="COMMAND", help="The command; {checkpoint}, {step}, {id}, {run}."
)
@click.option("--name", metavar="NAME", help="Name of the evaluation; by default a digest of COMMAND.")
@click.option(
    "--queue", type=click.IntRange(min=1), metavar="N", help="Most checkpoints that wait, the newest; 1 by default."
)
@click.option("--all", "everything", is_flag=True, help="All checkpoints that exist wait, in order.")
@follow_options
@click.option("--retries", type=click.IntRange(min=0), default=1, show_default=True, metavar="N",
              help="Further tries after a failure.")  # fmt: skip
@click.option("--timeout", metavar="TIME", help="Longest time of a try: 30m. Then it counts as failed.")
@click.option("--once", is_flag=True, help="End after the checkpoints that exist now.")
@json_option
def command(
    path: str,
    command_line: str,
    name: str | None,
    queue: int | None,
    everything: bool,
    which: str,
    nth: int,
    until: int | None,
    forever: bool,
    idle: str | None,
    every_s: float,
    retries: int,
    timeout: str | None,
    once: bool,
    as_json: bool,
) -> int:
    """Run a command for each new checkpoint of a run, and record its results as metrics of the checkpoint.

    The result is the last printed line that is a JSON object, or the content of the file in RELIGHT_RESULT. Its numbers become metrics:
    relight ls, best:METRIC and retention use them. No shell runs the command.

    A restarted follower continues: each checkpoint gets one result of each NAME. Ends when the run is finished. Exit code 1 if an
    evaluation failed.

    \b
    Examples:
      relight follow runs/demo --run "python eval.py {checkpoint}"
      relight follow runs/demo --run "eval.sh {checkpoint} {step}" --all --once
    """
    if everything and queue is not None:
        raise ConfigError("--all and --queue exclude each other", hint="leave one of them out")
    words = words_of(command_line)
    if shutil.which(words[0]) is None:
        raise ConfigError(f"there is no program {words[0]!r}", where="--run", hint="no shell runs the command")
    timeout_s = None if timeout is None else seconds_of(timeout, "--timeout")
    name = default_name(words) if name is None else name
    check_evaluation_name(name, "--name")
    if not name:
        raise ConfigError("the name is empty", where="--name", hint="without --name, it is a digest of COMMAND")
    source = followed(
        path, which, nth, until, forever, idle, every_s, queue=None if everything else (queue or 1), once=once
    )
    check_recordable(source.run.store)
    evaluation, failed = Evaluation(words, name, retries, timeout_s), False
    output = sys.stderr.buffer if as_json else sys.stdout.buffer
    for checkpoint in source.checkpoints(lambda history: {result.id for result in results_of(history, name)}):
        sys.stdout.flush()
        result = evaluation.evaluate(source.run, checkpoint, output)
        outcome = record(source.run, result, source.ending.stopping, lambda text: warn(escape(text)))
        failed |= bool(outcome.result.failed)
        _print(checkpoint, outcome, as_json)
    return 1 if failed else 0


def _print(checkpoint: Checkpoint, evaluated: RecordedResult, as_json: bool) -> None:
    result = evaluated.result
    if as_json:
        facts = {**result._asdict(), "step": checkpoint.step, "recorded": evaluated.recorded}
        click.echo(json.dumps(facts))
        return
    outcome = f"failed: {result.failed}" if result.failed else f"skipped: {result.skipped}" if result.skipped else ""
    text = outcome or metrics_text(dict(result.metrics)) or "no numbers"
    more = "" if evaluated.recorded or evaluated.removed else "; another follower of this name had recorded a result"
    click.echo(f"step {checkpoint.step} ({checkpoint.id}): {escape(text)}, {duration_text(result.seconds)}{more}")
