"""Finds what a job names by import path: ``module:Name``, looked for beside the job file first.

Invariant: the module named is the one in the job file's directory where there is one, whatever else is installed
under that name; nothing already imported is replaced. The directory joins ``sys.path`` only then, and at its end, so
that the module finds its own neighbours but shadows nobody's.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from actors.env.failures import UserError, one_line

_IMPORT_PATH = re.compile(r"(?P<module>\w+(\.\w+)*):(?P<name>\w+(\.\w+)*)")


class ImportFailed(ValueError):
    """An import path that leads nowhere; one line that says what was looked for and where."""


def is_import_path(text: str) -> bool:
    """Whether ``text`` is meant as ``module:Name`` (it may still be malformed)."""
    return ":" in text


def load_attribute(path: str, base: Path) -> Any:
    """What ``module:Name`` names; ``base`` is the job file's directory. Raises ``ImportFailed``."""
    match = _IMPORT_PATH.fullmatch(path)
    if match is None:
        raise ImportFailed(f"{path!r}: expected an import path such as my_env:MyEnvironment")
    module = _load_module(match["module"], path, base.resolve())
    found: Any = module
    for part in match["name"].split("."):
        if not hasattr(found, part):
            raise ImportFailed(f"{path!r}: {_place(module)} has no {part!r}{_offer(module)}")
        found = getattr(found, part)
    return found


def _load_module(name: str, path: str, base: Path) -> ModuleType:
    try:
        _prefer_local(name.partition(".")[0], path, base)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ImportFailed(
                f"{path!r}: no module {name!r}: looked for {Path(*name.split('.'))}.py in {base}, then among the "
                f"installed packages"
            ) from None
        raise ImportFailed(f"{path!r}: importing it failed: {one_line(error)}") from error
    except ImportFailed:
        raise
    except UserError as error:
        raise ImportFailed(f"{path!r}: importing it failed: {one_line(error)}") from error


def _prefer_local(top: str, path: str, base: Path) -> None:
    """Import the top-level module from ``base`` if it is there."""
    spec = PathFinder.find_spec(top, [str(base)])
    if spec is None or spec.origin is None:
        return
    imported = sys.modules.get(top)
    if imported is None:
        if str(base) not in sys.path:
            sys.path.append(str(base))
        _execute(spec, top)
    elif getattr(imported, "__file__", None) != spec.origin:
        raise ImportFailed(
            f"{path!r}: {spec.origin} has the name of a module that is already in use ({_place(imported)}): rename it"
        )


def _execute(spec: ModuleSpec, name: str) -> None:
    if spec.loader is None:
        raise ImportFailed(f"{name}: {spec.origin} is nothing that Python can load")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # as the import system does: a half-made module must not be found
        raise


def _place(module: ModuleType) -> str:
    return str(getattr(module, "__file__", None) or f"the built-in module {module.__name__}")


def _offer(module: ModuleType) -> str:
    """The names that the module itself defines, as a hint."""
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return f" (it defines {', '.join(own[:12])})" if own else ""
