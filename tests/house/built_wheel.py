"""Run by ``make wheel`` in an environment that has only the built wheel and what that asks for."""

from __future__ import annotations

import sys
from importlib.resources import files

import relight

assert ".." not in relight.__file__ and "/src/" not in relight.__file__, f"not the wheel: {relight.__file__}"
assert files("relight").joinpath("py.typed").is_file(), "py.typed is not in the wheel"
for name in ("templates/base.html", "static/htmx.js", "static/relight.css"):
    assert files("relight").joinpath("serve", name).is_file(), f"serve/{name} is not in the wheel"
missing = []
for name in relight.__all__:
    try:
        getattr(relight, name)
    except ModuleNotFoundError as error:
        assert error.name in ("torch", "numpy"), error
        missing.append(name)
assert missing in ([], ["Checkpointer", "Save", "failure_policy", "flattened"]), f"without torch there is no {missing}"
assert "torch" not in sys.modules
print(
    f"relight {relight.__version__} from its wheel: {len(relight.__all__) - len(missing)} of {len(relight.__all__)} names need no torch"
)
