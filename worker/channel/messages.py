"""What a frontend and the worker say over their Unix socket: attach, the model table, questions, farewell.

Frames are a u32 little-endian length and one msgpack value, at most ``MAX_FRAME_BYTES``. The data path never uses this
socket; its end of file is how each side learns that the other is gone.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engines.bundle.signature import Signature

LAYOUT_VERSION = 1
"""Version of segment layout and records; both numbers are named when they differ."""
MAX_FRAME_BYTES = 16 * 1024 * 1024


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One served (or failed) model version, as the worker tells every frontend.

    Attributes:
        model_id: unique in the worker's lifetime, never reused: a record that names an unloaded model is recognised.
        state: READY | LOADING | UNAVAILABLE | UNLOADING.
        reason: why it is not READY; empty otherwise.
        path: the bundle directory, where the frontend finds ``model.py``.
        platform: what executes it, such as ``onnxruntime``.
        signature: None unless READY.
        hooks: ``thread`` or ``inline``.
        model_py: path of the bundle's ``model.py``; empty without one.
        max_batch_size: effective cap on coalesced rows.
        task: manifest's ``task`` or empty.
    """

    model_id: int
    name: str
    version: str
    state: str
    reason: str = ""
    path: str = ""
    platform: str = ""
    signature: Signature | None = None
    hooks: str = "thread"
    model_py: str = ""
    max_batch_size: int = 0
    task: str = ""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend -> worker, first frame; carries two descriptors: the segment, the frontend's doorbell."""

    layout_version: int
    name: str
    pid: int
    records: int
    arena_bytes: int
    segment_bytes: int


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> frontend, answer to Hello; carries two descriptors: the worker's page, the worker's doorbell."""

    layout_version: int
    generation: int
    channel_id: int
    models: list[ModelEntry]


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> frontend instead of Welcome; says why and with which numbers. The worker closes the socket after it.

    Attributes:
        retryable: trying again later can succeed (the worker is draining, all channels are taken).
    """

    reason: str
    retryable: bool = False


class Models(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> frontend: the whole model table, sent again on every change."""

    models: list[ModelEntry]


class Draining(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> frontend: no new requests; those in flight are still answered."""


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Client -> worker: a question such as ``status``, ``metrics`` or ``policy``; one Answer follows."""

    id: int
    what: str
    args: dict[str, Any] = {}


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> client: ``kind`` 0 and a value, or a Kind number and its text."""

    id: int
    kind: int = 0
    text: str = ""
    value: Any = None


ToWorker = Hello | Ask
ToFrontend = Welcome | Refused | Models | Draining | Answer
