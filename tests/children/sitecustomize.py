"""Make torch cheaper to import in the interpreters that tests start, and spare optimizers the import of torch._dynamo.

``tests/conftest.py`` puts this directory on ``PYTHONPATH``. Interpreters that ignore ``PYTHONPATH`` start as a user's
do. With ``TESTS_PLAIN_TORCH`` set, all do. See docs/notes/043-shorter-ci.md.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # each start would pay for typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Loader:
    """Loader of a module in ``_CHANGED``, which changes the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        _CHANGED[module.__name__](self._loader, module)


class TorchFinder:
    """Finder of the modules in ``_CHANGED``."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec that Python would find, with a loader of this file."""
        if name not in _CHANGED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _load_torch(loader: Any, module: ModuleType) -> None:
    """Import torch without collecting garbage meanwhile, and exempt what torch made from all later collections.

    That saves a third of the processor time from the import to the end of the process.
    """
    import gc

    collects = gc.isenabled()
    gc.disable()
    try:
        loader.exec_module(module)
        gc.freeze()
    finally:
        if collects:
            gc.enable()


def _load_compile(loader: Any, module: Any) -> None:
    """Change ``_disable_dynamo``, which imports torch._dynamo at the first call of the decorated function.

    torch.compile must not compile such a function. Before torch._dynamo is imported, nothing is compiled, and the
    function itself is called.
    """
    import functools

    loader.exec_module(module)
    original = module._disable_dynamo

    @functools.wraps(original)
    def disable_dynamo(fn: Any = None, recursive: bool = True) -> Any:
        if fn is None:
            return functools.partial(disable_dynamo, recursive=recursive)
        disabled = original(fn, recursive)

        @functools.wraps(fn)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return (disabled if "torch._dynamo" in sys.modules else fn)(*args, **kwargs)

        return inner

    module._disable_dynamo = disable_dynamo


def _load_optimizer(loader: Any, module: Any) -> None:
    """Change the decorator of ``Optimizer.step``, which imports torch._dynamo to call ``graph_break``.

    In a function that is not compiled, ``graph_break`` does nothing.
    """
    import functools

    loader.exec_module(module)
    original = module._use_grad_for_differentiable

    @functools.wraps(original)
    def use_grad_for_differentiable(func: Any) -> Any:
        compilable = original(func)

        @functools.wraps(func)
        def step(*args: Any, **kwargs: Any) -> Any:
            if "torch._dynamo" in sys.modules:
                return compilable(*args, **kwargs)
            with module.torch.set_grad_enabled(args[0].defaults["differentiable"]):
                return func(*args, **kwargs)

        return step

    module._use_grad_for_differentiable = use_grad_for_differentiable


_CHANGED: dict[str, Callable[[Any, Any], None]] = {
    "torch": _load_torch,
    "torch._compile": _load_compile,
    "torch.optim.optimizer": _load_optimizer,
}


def install() -> None:
    """Change torch when this process imports it, unless that is installed already, or disabled by the environment."""
    names = [getattr(finder, "__name__", "") for finder in sys.meta_path]
    if TorchFinder.__name__ not in names and not os.environ.get("TESTS_PLAIN_TORCH"):
        sys.meta_path.insert(0, TorchFinder)


def _run_next() -> None:
    """Run the ``sitecustomize`` that Python would have found without this one."""
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if os.path.abspath(entry) != _HERE])
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        sys.modules[__name__] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


install()
if __name__ == "sitecustomize":
    _run_next()
