"""Which operation a request path names (protocols.md 1.1). Pure.

Paths are split before they are decoded, so that %2F stays inside a name; only a model's and a region's name are decoded
at all. What does not match letter by letter matches nothing: no operation is reached by an odd spelling, so that a
rule written for a path cannot be evaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final
from urllib.parse import unquote_to_bytes


class Operation(Enum):
    """What a client may ask for."""

    SERVER_METADATA = auto()
    SERVER_LIVE = auto()
    SERVER_READY = auto()
    MODEL_METADATA = auto()
    MODEL_READY = auto()
    MODEL_CONFIG = auto()
    MODEL_STATISTICS = auto()
    ALL_STATISTICS = auto()
    INFER = auto()
    GENERATE = auto()
    INDEX = auto()
    NAMED_INDEX = auto()
    LOAD = auto()
    UNLOAD = auto()
    MEMORY_STATUS = auto()
    MEMORY_REGISTER = auto()
    MEMORY_UNREGISTER = auto()
    CUDA_STATUS = auto()
    CUDA_REGISTER = auto()
    CUDA_UNREGISTER = auto()
    TRACE = auto()
    LOGGING = auto()


GET: Final = ("GET", "HEAD")
POST: Final = ("POST",)
BOTH: Final = ("GET", "HEAD", "POST")

METHODS: Final[dict[Operation, tuple[str, ...]]] = {
    Operation.SERVER_METADATA: GET,
    Operation.SERVER_LIVE: GET,
    Operation.SERVER_READY: GET,
    Operation.MODEL_METADATA: GET,
    Operation.MODEL_READY: GET,
    Operation.MODEL_CONFIG: GET,
    Operation.MODEL_STATISTICS: GET,
    Operation.ALL_STATISTICS: GET,
    Operation.INFER: POST,
    Operation.GENERATE: POST,
    Operation.INDEX: POST,
    Operation.NAMED_INDEX: POST,
    Operation.LOAD: POST,
    Operation.UNLOAD: POST,
    Operation.MEMORY_STATUS: GET,
    Operation.MEMORY_REGISTER: POST,
    Operation.MEMORY_UNREGISTER: POST,
    Operation.CUDA_STATUS: GET,
    Operation.CUDA_REGISTER: POST,
    Operation.CUDA_UNREGISTER: POST,
    Operation.TRACE: BOTH,
    Operation.LOGGING: BOTH,
}


@dataclass(frozen=True, slots=True)
class Place:
    """An operation and what it is about: a model with its version, or a shared-memory region; empty if none."""

    operation: Operation
    name: str = ""
    version: str = ""


_FIXED: Final[dict[bytes, Place]] = {
    b"/v2": Place(Operation.SERVER_METADATA),
    b"/v2/health/live": Place(Operation.SERVER_LIVE),
    b"/v2/health/ready": Place(Operation.SERVER_READY),
    b"/v2/models/stats": Place(Operation.ALL_STATISTICS),
    b"/v2/repository/index": Place(Operation.INDEX),
    b"/v2/trace/setting": Place(Operation.TRACE),
    b"/v2/logging": Place(Operation.LOGGING),
}
_OF_MODEL: Final[dict[tuple[bytes, ...], Operation]] = {
    (): Operation.MODEL_METADATA,
    (b"ready",): Operation.MODEL_READY,
    (b"config",): Operation.MODEL_CONFIG,
    (b"stats",): Operation.MODEL_STATISTICS,
    (b"infer",): Operation.INFER,
    (b"generate",): Operation.GENERATE,
    (b"generate_stream",): Operation.GENERATE,
    (b"trace", b"setting"): Operation.TRACE,
}
_OF_REPOSITORY: Final = {b"load": Operation.LOAD, b"unload": Operation.UNLOAD}
_OF_MEMORY: Final[dict[bytes, dict[bytes, Operation]]] = {
    b"systemsharedmemory": {
        b"status": Operation.MEMORY_STATUS,
        b"register": Operation.MEMORY_REGISTER,
        b"unregister": Operation.MEMORY_UNREGISTER,
    },
    b"cudasharedmemory": {
        b"status": Operation.CUDA_STATUS,
        b"register": Operation.CUDA_REGISTER,
        b"unregister": Operation.CUDA_UNREGISTER,
    },
}
_MODELS: Final = b"/v2/models/"
_INFER: Final = b"/infer"


def find(raw_path: bytes) -> Place | None:
    """Return what a still encoded path names, None if nothing. One trailing slash is tolerated."""
    if raw_path.startswith(_MODELS):
        # The hot path first: /v2/models/M/infer.
        if raw_path.endswith(_INFER) and raw_path.count(b"/") == 4:
            return _place(Operation.INFER, raw_path[len(_MODELS) : -len(_INFER)])
        if (fixed := _FIXED.get(raw_path.removesuffix(b"/"))) is not None:
            return fixed
        return _of_model(raw_path.removesuffix(b"/")[len(_MODELS) :].split(b"/"))
    raw_path = raw_path.removesuffix(b"/")
    if (fixed := _FIXED.get(raw_path)) is not None:
        return fixed
    match raw_path.split(b"/"):
        case [b"", b"v2", b"repository", repository, b"index"]:
            return _place(Operation.NAMED_INDEX, repository)
        case [b"", b"v2", b"repository", b"models", model, act] if act in _OF_REPOSITORY:
            return _place(_OF_REPOSITORY[act], model)
        case [b"", b"v2", b"repository", repository, b"models", model, act] if act in _OF_REPOSITORY and repository:
            return _place(_OF_REPOSITORY[act], model)
        case [b"", b"v2", memory, b"region", region, act] if act in _OF_MEMORY.get(memory, ()):
            return _place(_OF_MEMORY[memory][act], region)
        case [b"", b"v2", memory, (b"status" | b"unregister") as act] if memory in _OF_MEMORY:
            return Place(_OF_MEMORY[memory][act])
    return None


def _of_model(segments: list[bytes]) -> Place | None:
    model, *rest = segments
    version = ""
    if len(rest) >= 2 and rest[0] == b"versions":
        if not (rest[1].isascii() and rest[1].isdigit()):
            return None
        version = rest[1].decode()
        rest = rest[2:]
    operation = _OF_MODEL.get(tuple(rest))
    return None if operation is None else _place(operation, model, version)


def _place(operation: Operation, encoded: bytes, version: str = "") -> Place | None:
    if b"%" in encoded:
        encoded = unquote_to_bytes(encoded)
    try:
        name = encoded.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if name in ("", ".", ".."):
        return None
    return Place(operation, name, version)
