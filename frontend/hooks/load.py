"""Loading ``model.py``: trusted code, run once in every frontend process.

The file becomes a module of its own under a private name. It is compiled from its text each time, without the import
system's caches: nothing is written into the model repository (it may be read-only, and is watched for changes), and a
changed file is never answered with old code. Neighbouring files are not importable.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from engines.bundle.signature import Signature
from engines.errors import HookFailed

MAX_SOURCE_BYTES: Final = 4 * 1024 * 1024
"""Size of a ``model.py``; data belongs in files beside it, read by ``load``."""

Hook = Callable[[Any, Any], Any]
_PARAMETERS: Final = {"load": ("path",), "preprocess": ("inputs", "ctx"), "postprocess": ("outputs", "ctx")}
_PREFIX: Final = "_bundle_hooks_"
_numbers = itertools.count(1)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hooks:
    """The user code of one model version in this process.

    Attributes:
        state: what ``load(path)`` returned; None without a ``load``.
        preprocess, postprocess: ``def`` or ``async def``; None where the file defines none.
        module_name: the private name under which the module is registered until ``close``.
    """

    model: str
    version: str
    # Not in the repr, which logs may hold: a tokenizer's runs to megabytes.
    state: Any = field(repr=False)
    preprocess: Hook | None
    postprocess: Hook | None
    module_name: str

    def close(self) -> None:
        """Forget the module; requests that still hold this object can finish. Idempotent."""
        sys.modules.pop(self.module_name, None)


def load_hooks(bundle_path: Path, model_py: Path | None, *, model: str, version: str) -> Hooks | None:
    """Return the hooks in ``model_py`` after running its ``load(bundle_path)``; None without a file.

    Blocks for as long as the file's top level and ``load`` take, so call it from a thread.

    Raises:
        HookFailed: the file cannot be read, does not compile, raises, or defines a hook that cannot be called as
            documented. The message names the model and the place; a traceback of user code goes to the log only.
    """
    if model_py is None:
        return None
    where = f"model '{model}' version '{version}': {model_py.name}"
    module = _module(model_py, where)
    try:
        _execute(module, model_py, where)
        found = {name: _function(module, name, where) for name in _PARAMETERS}
        if not any(found.values()):
            raise HookFailed(f"{where} defines none of {', '.join(_PARAMETERS)}{_misspelt(module)}")
        state = None
        load = found["load"]
        if load is not None:
            state = _load(load, bundle_path, where)
    except BaseException:
        sys.modules.pop(module.__name__, None)
        raise
    return Hooks(model, version, state, found["preprocess"], found["postprocess"], module.__name__)


def require_hooks(hooks: Hooks | None, signature: Signature, *, model: str, version: str) -> None:
    """Check that client tensors that differ from the executable ones have a hook that makes the difference.

    Raises:
        HookFailed: names the list of the manifest and the missing hook.
    """
    cases = (
        ("client_inputs", signature.client_inputs, signature.inputs, "preprocess", hooks and hooks.preprocess),
        ("client_outputs", signature.client_outputs, signature.outputs, "postprocess", hooks and hooks.postprocess),
    )
    for key, client, executable, name, hook in cases:
        if client != executable and hook is None:
            raise HookFailed(
                f"model '{model}' version '{version}': the manifest's {key} differ from the executable tensors, but "
                f"model.py defines no {name}"
            )


def _module(model_py: Path, where: str) -> ModuleType:
    """Return an empty module registered under a private name; some library code looks its module up by name."""
    try:
        size = model_py.stat().st_size
    except OSError as error:
        raise HookFailed(f"{where} cannot be read: {error.strerror or error}") from None
    if size > MAX_SOURCE_BYTES:
        raise HookFailed(f"{where} is {size} bytes, the limit is {MAX_SOURCE_BYTES}; keep data in files beside it")
    module = ModuleType(f"{_PREFIX}{next(_numbers)}")
    module.__file__ = str(model_py)
    sys.modules[module.__name__] = module
    return module


def _execute(module: ModuleType, model_py: Path, where: str) -> None:
    try:
        code = compile(model_py.read_bytes(), str(model_py), "exec", dont_inherit=True)
    except OSError as error:
        raise HookFailed(f"{where} cannot be read: {error.strerror or error}") from None
    except SyntaxError as error:
        raise HookFailed(f"{where} is not valid Python: line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise HookFailed(f"{where} is not valid Python: {error}") from None
    try:
        exec(code, module.__dict__)
    except ModuleNotFoundError as error:
        hint = ""
        if error.name and (model_py.parent / f"{error.name.partition('.')[0]}.py").exists():
            hint = "; files beside model.py cannot be imported, move the code into it"
        raise _failed(error, f"{where} imports '{error.name}', which is not installed{hint}") from None
    except BaseException as error:
        raise _failed(error, f"{where} raised {type(error).__name__} when it was imported") from None


def _load(load: Callable[..., Any], bundle_path: Path, where: str) -> Any:
    home = getattr(load, "__module__", None)
    # "from json import load" is a slip, a load from the user's own package is not; only failing tells them apart.
    imported = isinstance(home, str) and home in sys.modules and not home.startswith(_PREFIX)
    origin = (
        f" (imported from {home}; if it is not meant as the hook, import it under another name)" if imported else ""
    )
    try:
        state = load(bundle_path)
    except BaseException as error:
        raise _failed(error, f"{where}: load{origin} raised {type(error).__name__}") from None
    if inspect.isawaitable(state):
        if inspect.iscoroutine(state):
            state.close()
        raise HookFailed(f"{where}: load must be a plain def, found async def")
    return state


def _failed(error: BaseException, message: str) -> HookFailed:
    _log.error("hook.load_failed reason=%r", message, exc_info=error)
    return HookFailed(f"{message}; the traceback is in the log")


def _function(module: ModuleType, name: str, where: str) -> Callable[..., Any] | None:
    found = module.__dict__.get(name)
    if found is None:
        return None
    parameters = _PARAMETERS[name]
    call = f"{name}({', '.join(parameters)})"
    if not callable(found):
        raise HookFailed(f"{where}: {name} must be a function {call}, found {type(found).__name__}")
    hook: Callable[..., Any] = found
    try:
        shape = inspect.signature(hook)
    except (TypeError, ValueError):
        # Some built-in callables do not tell; calling them will.
        return hook
    try:
        shape.bind(*parameters)
    except TypeError:
        raise HookFailed(f"{where}: {name} must be callable as {call}, found {name}{shape}") from None
    return hook


def _misspelt(module: ModuleType) -> str:
    pairs = {
        name: get_close_matches(name.lower(), _PARAMETERS, n=1, cutoff=0.7)
        for name, value in vars(module).items()
        if callable(value)
    }
    hits = [f"{name} (write {close[0]})" for name, close in pairs.items() if close]
    return f"; found {', '.join(hits)}" if hits else ""
