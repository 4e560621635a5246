"""Start a module of the Relight that this file belongs to: ``python -P bootstrap.py MODULE [ARGS…]``, built by ``children.child_command``.

With ``-P`` the interpreter puts neither the working directory nor this file's directory on ``sys.path``. The package is loaded from its
place, not searched by name. Its directory is appended to the end of ``sys.path``, so a file next to the package shadows nothing.
"""

import os
import sys


def main() -> None:
    """Load this installation of Relight and run the named module as ``__main__``."""
    from importlib.util import module_from_spec, spec_from_file_location

    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = spec_from_file_location(
        "relight", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    if spec is None or spec.loader is None:
        raise SystemExit(f"relight: {package} is not a package")
    sys.modules["relight"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    home = os.path.dirname(package)
    if home not in sys.path:
        sys.path.append(home)
    del sys.argv[0]
    import runpy

    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
