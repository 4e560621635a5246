"""Tracebacks of Relight's errors, without the lines of Relight."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from relight.errors import InternalError, RelightError
from relight.settings.environment import environment

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def short_traceback(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Return a function of the public API. The traceback of a ``RelightError`` from it ends there: see ``shortened``."""

    @wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except RelightError as error:
            raise shortened(error)  # noqa: B904 - RELIGHT_DEBUG=1 shows the lines of Relight

    return call


def shortened(error: RelightError) -> RelightError:
    """Return the error without its lines in Relight, so that the caller's own line is the last but one that Python shows.

    If the script's own code raised it, such as a trigger that Relight called, its lines stay. Causes keep their lines outside of Relight,
    or the line that raised them. Errors that Relight handled before are no longer shown as its context. ``InternalError`` keeps everything,
    because its report needs it; so does every error with ``RELIGHT_DEBUG=1``.
    """
    if isinstance(error, InternalError) or _shows_all():
        return error
    met: set[int] = {id(error)}  # an error that was sent or raised twice may be its own cause
    cause = error.__cause__
    while cause is not None and id(cause) not in met:
        met.add(id(cause))
        cause.__traceback__ = _outside(cause.__traceback__)
        cause = cause.__cause__
    context = error.__context__
    while context is not None and context.__traceback__ is not None and _is_ours(context.__traceback__):
        met.add(id(context))
        context = context.__context__ if id(context.__context__) not in met else None
    error.__context__ = context
    return error.with_traceback(_scripts(error.__traceback__))


def _shows_all() -> bool:
    try:
        return environment().debug
    except RelightError:  # the variable is set, to something else
        return True


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from its first line outside of Relight on; else its last line."""
    while trace is not None and trace.tb_next is not None and _is_ours(trace):
        trace = trace.tb_next
    return trace


def _scripts(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from its first line on that is neither in Relight nor in a library; None if there is none."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_HERE, _LIBRARY, "<")):
        trace = trace.tb_next
    return trace


def _is_ours(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_HERE)
