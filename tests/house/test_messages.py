"""Every text of an error, event, warning or hint is in ``messages.md``, where a review sees that it changes."""

import ast

import messages


def test_the_file_has_the_present_messages() -> None:
    """``messages.md`` equals what the source reports."""
    assert messages.PAGE.read_text(encoding="utf-8") == messages.page(), "python tests/house/messages.py writes it"


def test_texts_are_found_where_code_states_them() -> None:
    """Constants, f-strings, conditions, assigned names and functions that make errors are all listed."""
    source = """
HINT = "train first"

def check(path, short):
    text = "no run here" if short else f"no run in {path}"
    if short:
        raise ConfigError(text, where=f"{path}", hint=HINT)
    emit("run.lost", f"{path} is lost: {text}", run=path)
    raise _refuse("the run is refused")
"""
    assert messages.of(ast.parse(source)) == [
        "ConfigError: no run here | no run in {path} [{path}] → train first",
        "event run.lost: {path} is lost: {text}",
        "refuse: the run is refused",
    ]
