"""Every scalar setting under ``global``: its path, type, default, choices and environment variable, in one table.

The table is drawn from the frozen settings classes, so a setting cannot exist without its path and variable.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from msgspec import Meta

from frontend.settings import ControlSettings, EndpointSettings, GrpcSettings, SystemSharedMemorySettings
from worker.config import ChannelSettings, Positive, RuntimeSettings, SchedulerSettings

ENVIRONMENT_PREFIX: Final = "INFERENCE_SERVER_"
SECTIONS: Final[dict[str, type[msgspec.Struct]]] = {
    "runtime": RuntimeSettings,
    "scheduler": SchedulerSettings,
    "endpoints": EndpointSettings,
    "endpoints.system_shared_memory": SystemSharedMemorySettings,
    "grpc": GrpcSettings,
    "channel": ChannelSettings,
    "control": ControlSettings,
}
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "global.model_control_mode": ("dynamic", "static", "explicit"),
    "global.runtime.backend": ("auto", "cpu", "cuda", "onnxruntime", "array", "tensorrt"),
    "global.runtime.numerics": ("auto", "tf32", "f32"),
    "global.scheduler.discipline": ("fair", "fifo", "edf"),
    "global.scheduler.sizing": ("fill", "learned"),
    "global.grpc.server": ("grpcio", "fast"),
}
NOT_AVAILABLE: Final[dict[str, dict[str, str]]] = {
    "global.model_control_mode": {"explicit": "loading and unloading by request is not available yet"},
}
"""Values that are part of the format but that this version cannot honour; accepting them would be a lie."""
MAX_SECONDS: Final = 31 * 86_400.0
"""Longest time any setting may name: larger ones overflow once they are nanoseconds in a record."""
MAX_WHOLE: Final = 1 << 40
"""Largest whole number any setting may hold: well within the 64-bit words of records and JSON."""


@dataclass(frozen=True, slots=True)
class Option:
    """One scalar of the node file.

    Attributes:
        path: where it stands, such as ``global.scheduler.discipline``.
        section: keys of the mappings that hold it, joined by dots; empty for a scalar directly under ``global``.
        kind: its type, with bounds as msgspec annotations.
        choices: allowed words; empty if any value of the type may stand.
    """

    path: str
    section: str
    key: str
    kind: Any
    default: Any
    choices: tuple[str, ...]
    environment: str


class BadValue(Exception):
    """The text says what was expected and what came."""


def _option(section: str, key: str, kind: Any, default: Any) -> Option:
    path = ".".join(part for part in ("global", section, key) if part)
    variable = ENVIRONMENT_PREFIX + "_".join(path.split(".")[1:]).upper()
    return Option(path, section, key, kind, default, _CHOICES.get(path, ()), variable)


def _draw_table() -> Iterator[Option]:
    yield _option("", "model_control_mode", str, "dynamic")
    yield _option("", "model_poll_seconds", Positive, 15.0)
    for section, kind in SECTIONS.items():
        for field in msgspec.structs.fields(kind):
            if get_origin(field.type) is not dict and f"{section}.{field.name}" not in SECTIONS:
                yield _option(section, field.name, field.type, field.default)


OPTIONS: Final[tuple[Option, ...]] = tuple(_draw_table())
BY_PATH: Final = {option.path: option for option in OPTIONS}
BY_ENVIRONMENT: Final = {option.environment: option for option in OPTIONS}


def convert(path: str, kind: Any, value: Any, *, text: bool) -> Any:
    """Return ``value`` in its setting's type.

    Args:
        text: the value is a string from the environment or the command line, so ``"8"`` is a number.

    Raises:
        BadValue: it does not fit, or this version cannot honour it.
    """
    choices = _CHOICES.get(path, ())
    try:
        converted = msgspec.convert(value, kind, strict=not text)
    except msgspec.ValidationError:
        raise BadValue(f"expected {describe(kind, choices)}, got {reprlib.repr(value)}") from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise BadValue(f"expected {describe(kind, choices)}, got {reprlib.repr(value)}")
    limit = MAX_SECONDS if path.endswith("_seconds") else MAX_WHOLE
    if isinstance(converted, int | float) and converted > limit:
        raise BadValue(f"expected at most {limit:g}, got {reprlib.repr(value)}")
    if choices and converted not in choices:
        raise BadValue(f"expected {describe(kind, choices)}, got {reprlib.repr(value)}")
    missing = NOT_AVAILABLE.get(path, {}).get(converted if isinstance(converted, str) else "")
    if missing:
        raise BadValue(f"{reprlib.repr(value)}: {missing}")
    return converted


def unknown_keys(path: str, found: Iterable[Any], known: Sequence[str]) -> list[str]:
    """Return a mistake for each key that the mapping at ``path`` cannot have, with the one that was meant."""
    import difflib

    mistakes = []
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
            mistakes.append(f"{path}.{key}: unknown key{hint}" if path else f"{key}: unknown key{hint}")
    return mistakes


def describe(kind: Any, choices: tuple[str, ...]) -> str:
    """Return what a value of this type looks like, for a person: ``a whole number from 0 to 65535``."""
    if choices:
        return "|".join(choices)
    base, bounds = kind, Meta()
    if get_origin(kind) is Annotated:
        base, bounds = get_args(kind)[:2]
    noun = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(base, str(base))
    if bounds.gt is not None and bounds.le is not None:
        return f"{noun} above {bounds.gt} and at most {bounds.le}"
    if bounds.gt is not None:
        return f"{noun} above {bounds.gt}"
    if bounds.ge is not None and bounds.le is not None:
        return f"{noun} from {bounds.ge} to {bounds.le}"
    if bounds.ge is not None and bounds.lt is not None:
        return f"{noun} from {bounds.ge} to below {bounds.lt}"
    if bounds.ge is not None:
        return f"{noun} of at least {bounds.ge}"
    return noun
