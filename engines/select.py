"""Which engine runs a model: the bundle's own choice, else the node's, else the best that is installed.

Device libraries are large and may be missing, so each engine is imported when a model first asks for it.
"""

from __future__ import annotations

from typing import Final, Protocol

from engines.base import Engine
from engines.errors import NotReady

AUTO: Final = "auto"
AUTO_ORDER: Final = ("onnxruntime", "array")
"""Engines that ``auto`` tries, best first."""
INSTALL: Final[dict[str, str]] = {
    "onnxruntime": "install it with: pip install onnxruntime",
    "array": "install what it reads model files with: pip install onnx",
}
LATER: Final = ("tensorrt",)
"""Engines that the formats name and this version does not have."""


class Runtime(Protocol):
    """The part of the node's runtime settings that choosing an engine needs."""

    @property
    def backend(self) -> str:
        """``auto`` or an engine's name."""
        ...

    @property
    def threads(self) -> int:
        """Threads to compute with; 0 lets the engine choose."""
        ...


class EngineSet:
    """The engines of one worker process, each made once."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._engines: dict[str, Engine] = {}

    def choose(self, wanted: str) -> Engine:
        """Return the engine for a manifest's ``engine`` value; ``auto`` defers to ``runtime.backend``.

        Raises:
            NotReady: unknown name, not in this version, or its library is missing; says what to do.
        """
        place, name = ("engine", wanted) if wanted != AUTO else ("runtime.backend", self._runtime.backend)
        if name != AUTO:
            return self._engine(name, place)
        missing: list[str] = []
        for candidate in AUTO_ORDER:
            try:
                return self._engine(candidate, place)
            except NotReady as error:
                missing.append(str(error))
        raise NotReady("no engine can be used: " + "; ".join(missing))

    def close(self) -> None:
        """Close every engine that was made; models must be closed before."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _engine(self, name: str, place: str) -> Engine:
        engine = self._engines.get(name)
        if engine is None:
            try:
                engine = self._engines[name] = self._made(name, place)
            except ImportError as error:
                raise NotReady(
                    f"{place}: {name} cannot be used: {error}; {INSTALL[name]}, or write {place}: {AUTO}"
                ) from error
        return engine

    def _made(self, name: str, place: str) -> Engine:
        if name == "onnxruntime":
            from engines.onnxruntime import OnnxRuntimeEngine

            return OnnxRuntimeEngine(threads=self._runtime.threads)
        if name == "array":
            from engines.array.engine import ArrayEngine

            return ArrayEngine()
        known = ", ".join((AUTO, *INSTALL))
        if name in LATER:
            raise NotReady(f"{place}: {name} is not in this version; choose one of {known}")
        raise NotReady(f"{place}: unknown engine '{name}'; choose one of {known}")
