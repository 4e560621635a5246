"""Errors of click as Relight's own: what is wrong, and what to do, without a usage block."""

from __future__ import annotations

import click

from relight.errors import ConfigError


def usage_error(error: click.ClickException) -> ConfigError:
    """Return the error that reports ``error`` as all others are reported. Its hint names the command's help."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context is not None else "relight"
    near = ""
    if isinstance(error, click.NoSuchOption):
        what = f"there is no option {error.option_name}"
        if error.possibilities:
            near = f"did you mean {' or '.join(sorted(error.possibilities)[:3])}? "
    elif isinstance(error, click.MissingParameter) and error.param is not None:
        kind = "argument" if isinstance(error.param, click.Argument) else "option"
        what = f"the {kind} {_name(error.param, context)} is missing"
    elif isinstance(error, click.BadParameter) and error.param is not None:
        why = (
            _small(error.message)
            .replace("a valid integer range", "a whole number")
            .replace("a valid integer", "a whole number")
        )
        what = f"{_name(error.param, context)} is invalid: {why}"
    else:
        what = _small(error.format_message())
    return ConfigError(what, hint=f"{near}{path} --help has its arguments and options" if context is not None else near)


def _name(param: click.Parameter, context: click.Context | None) -> str:
    if isinstance(param, click.Argument):
        return param.make_metavar(context or click.Context(click.Command("relight"))).strip("[]{}…").removesuffix("...")
    return max(param.opts, key=len)


def _small(text: str) -> str:
    """Return a message without its full stop, and with a small first letter unless the first word is a name."""
    text = " ".join(text.split()).removesuffix(".")
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
