"""The seam to TensorRT's Python module: which one is installed, its types in our words, its callbacks as our classes.

One code path serves TensorRT 10.16, 11 and TensorRT-RTX, since whatever 11 removed has its replacement in 10.16. The
module is an argument everywhere, so that tests hand in one that checks every call, and nothing is imported before an
engine is made.

Trap: a ``Runtime`` made on a machine without a device ends the process when it is used or freed in some builds. The
caller must have found a device before.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from engines.errors import NotReady

OLDEST: Final = (10, 16)
"""The oldest TensorRT with the names that 11 kept."""
MODULES: Final = ("tensorrt", "tensorrt_rtx")
"""Modules that are tried, the full library first: RTX serves consumer GPUs only, and lacks plugins."""
INSTALL: Final = "install it with: pip install 'tensorrt>=10.16'"
MAX_MESSAGES: Final = 64
"""Messages a log keeps; the first ones name the cause, later ones repeat it."""
MAX_ERRORS: Final = 16
"""Errors a recorder keeps per execution."""
MAX_MESSAGE_CHARS: Final = 400

_DTYPES: Final[dict[str, str]] = {
    "bool": "BOOL", "u8": "UINT8", "i8": "INT8", "i32": "INT32", "i64": "INT64", "f16": "HALF", "bf16": "BF16",
    "f32": "FLOAT",
}  # fmt: skip
"""Manifest types that TensorRT carries. It takes a file's f64 too, but computes it as f32, which is another answer."""


@dataclass(frozen=True, slots=True)
class Message:
    """One line of TensorRT's log; ``severity`` is the library's own word, such as ERROR."""

    severity: str
    text: str


class MessageLog:
    """What TensorRT said. It raises nothing itself, so this is where reasons come from. Any thread may append."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def add(self, severity: str, text: str) -> None:
        """Keep a message, within ``MAX_MESSAGES``."""
        if len(self.messages) < MAX_MESSAGES:
            self.messages.append(Message(severity, shortened(text)))

    def take(self) -> list[Message]:
        """Return the messages and begin anew."""
        taken, self.messages = self.messages, []
        return taken


class Api:
    """TensorRT's module and the little that differs between versions.

    Attributes:
        module: the library.
        name: its import name.
        version: as the library tells it.
    """

    def __init__(self, module: Any, name: str) -> None:
        self.module = module
        self.name = name
        self.version = str(module.__version__)
        self._by_type: dict[Any, str] = {
            getattr(module.DataType, theirs): ours
            for ours, theirs in _DTYPES.items()
            if hasattr(module.DataType, theirs)
        }

    @classmethod
    def load(cls) -> Api:
        """Return the API of the module that is installed.

        Raises:
            NotReady: none is, or it is too old; says what to install.
        """
        reasons: list[str] = []
        for name in MODULES:
            try:
                module = importlib.import_module(name)
            except (ImportError, OSError) as error:
                # A library that the wheel cannot find at import is an OSError.
                reasons.append(f"{name}: {error}")
                continue
            if not hasattr(module, "Builder"):
                reasons.append(f"{name}: a directory of that name is on the path, or the package is incomplete")
                continue
            return cls(module, name).checked()
        raise NotReady(f"TensorRT cannot be imported ({'; '.join(reasons)}); {INSTALL}")

    def checked(self) -> Api:
        """Return this API if it has the names that the engine uses.

        Raises:
            NotReady: the library is older than 10.16; RTX counts its versions for itself and has always had them.
        """
        found = tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])
        if not self.is_rtx and found < OLDEST:
            raise NotReady(f"TensorRT {self.version} is too old, the oldest supported is 10.16; {INSTALL}")
        return self

    @property
    def is_rtx(self) -> bool:
        """Whether this is TensorRT-RTX: it compiles kernels on the target, so it builds without a device."""
        return "rtx" in self.name

    @property
    def network_flags(self) -> int:
        """Flags of ``create_network``: computed in the file's own types. From 11 on there is nothing else."""
        flags = self.module.NetworkDefinitionCreationFlag
        return 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0

    def dtype_name(self, dtype: Any) -> str:
        """Return the manifest's name of a ``DataType``, or the library's where we have none."""
        return self._by_type.get(dtype) or str(getattr(dtype, "name", dtype))

    @staticmethod
    def carries(dtype: str) -> bool:
        """Return whether tensors of this manifest type can be inputs and outputs."""
        return dtype in _DTYPES

    def logger(self, log: MessageLog) -> Any:
        """Return an ``ILogger`` that keeps warnings and worse."""
        return _logger(self.module, log)

    def error_recorder(self) -> Any:
        """Return an ``IErrorRecorder`` with ``texts()`` and ``clear()``."""
        return _recorder(self.module)

    def output_allocator(self) -> Any:
        """Return an ``IOutputAllocator`` over room given with ``offer``; ``shape`` is the last output's."""
        return _allocator(self.module)

    def gpu_allocator(self, memory: DeviceAllocator) -> Any:
        """Return an ``IGpuAsyncAllocator`` over ``memory``; it must outlive everything that the library makes."""
        return _gpu_allocator(self.module, memory)

    @property
    def defers_weights(self) -> bool:
        """Whether weights inside a plan can be loaded and unloaded while its contexts stay."""
        return hasattr(self.module.ICudaEngine, "unload_weights")

    def progress_monitor(self, told: Progress) -> Any:
        """Return an ``IProgressMonitor`` that tells fractions of a whole build; None if the library has none."""
        return _monitor(self.module, told) if hasattr(self.module, "IProgressMonitor") else None


class DeviceAllocator(Protocol):
    """Where the library gets device memory; see ``memory``."""

    def allocate(self, size_bytes: int, stream: int) -> int | None: ...
    def release(self, address: int, stream: int) -> bool: ...


Progress = Callable[[float], None]
"""Told how much of a build is done, 0 to 1, never less than before."""


def shortened(text: str) -> str:
    """Return a library message on one line, without its source places, call names and error numbers."""
    text = " ".join(re.sub(r"\s*\(?\bIn \S+ at \S+:\d+\)?", "", text).split())
    text = re.sub(r"^(?:\w+::\w+: )?(?:Error Code \d+: )?", "", text)
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."


def _logger(module: Any, log: MessageLog) -> Any:
    worst = int(module.ILogger.WARNING)

    class Logger(module.ILogger):  # type: ignore[misc]
        """Errors and warnings only: everything else is thousands of lines per build."""

        def __init__(self) -> None:
            super().__init__()

        def log(self, severity: Any, msg: str) -> None:
            if int(severity) <= worst:
                log.add(str(getattr(severity, "name", severity)), msg)

    return Logger()


def _recorder(module: Any) -> Any:
    class Recorder(module.IErrorRecorder):  # type: ignore[misc]
        """Errors of executions. A full recorder drops later errors and says so, as the interface asks."""

        def __init__(self) -> None:
            super().__init__()
            self._errors: list[tuple[Any, str]] = []
            self._overflowed = False

        def num_errors(self) -> int:
            return len(self._errors)

        def get_error_code(self, index: int) -> Any:
            return self._errors[index][0]

        def get_error_desc(self, index: int) -> str:
            return self._errors[index][1]

        def has_overflowed(self) -> bool:
            return self._overflowed

        def clear(self) -> None:
            self._errors.clear()
            self._overflowed = False

        def report_error(self, code: Any, description: str) -> bool:
            if len(self._errors) < MAX_ERRORS:
                self._errors.append((code, description))
            else:
                self._overflowed = True
            # Whether the error ends the execution is the library's to say; we look at its result.
            return True

        def texts(self) -> list[str]:
            return [shortened(text) for _, text in self._errors]

    return Recorder()


def _allocator(module: Any) -> Any:
    class Allocator(module.IOutputAllocator):  # type: ignore[misc]
        """Hands out one fixed room: an output can be no larger than the library's own upper bound."""

        def __init__(self) -> None:
            super().__init__()
            self._address = 0
            self._room_bytes = 0
            self.shape: tuple[int, ...] | None = None
            self.refused_bytes = 0

        def offer(self, address: int, room_bytes: int) -> None:
            self._address, self._room_bytes = address, room_bytes
            self.shape, self.refused_bytes = None, 0

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            if size > self._room_bytes:
                self.refused_bytes = size
                return 0
            return self._address

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self.shape = tuple(int(size) for size in shape)

    return Allocator()


def _gpu_allocator(module: Any, blocks: DeviceAllocator) -> Any:
    class GpuAllocator(module.IGpuAsyncAllocator):  # type: ignore[misc]
        """Passes the library's requests on. It asks for no alignment beyond the driver's.

        A refusal is the address 0: at None the bindings print an error of their own.
        """

        def __init__(self) -> None:
            super().__init__()

        def allocate_async(self, size: int, alignment: int, flags: int, stream: int) -> int:
            return blocks.allocate(size, stream) or 0

        def deallocate_async(self, memory: int, stream: int) -> bool:
            return blocks.release(memory, stream)

        def reallocate(self, address: int, alignment: int, new_size: int) -> int:
            # Blocks do not grow: the library then asks for another one.
            return 0

    return GpuAllocator()


def _monitor(module: Any, told: Progress) -> Any:
    class Monitor(module.IProgressMonitor):  # type: ignore[misc]
        """Phases nest: a phase is one step of its parent, so the outermost phases' steps add up to the whole."""

        def __init__(self) -> None:
            super().__init__()
            self._phases: dict[str, tuple[str | None, int, int]] = {}
            self._done = 0.0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._phases[phase_name] = (parent_phase, num_steps, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._phases:
                parent, steps, _ = self._phases[phase_name]
                self._phases[phase_name] = (parent, steps, step + 1)
                self._tell()
            return True

        def phase_finish(self, phase_name: str) -> None:
            self._phases.pop(phase_name, None)

        def _tell(self) -> None:
            # Only what is under one outermost phase counts; others run beside it and say nothing about the whole.
            done = max((self._fraction(name) for name, phase in self._phases.items() if not phase[0]), default=0.0)
            if done > self._done:
                self._done = done
                told(min(done, 1.0))

        def _fraction(self, name: str) -> float:
            _, steps, at = self._phases[name]
            inside = [self._fraction(child) for child, phase in self._phases.items() if phase[0] == name]
            return min(1.0, (at + max(inside, default=0.0)) / max(steps, 1))

    return Monitor()
