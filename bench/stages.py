"""Which stage of a request a sampled stack belongs to: the innermost frame that lies in a file of ours decides.

Names of files and functions only; a file that is not listed shows under its own name, so nothing is hidden.
"""

from __future__ import annotations

import re

LOOP = "event loop: epoll, sockets"
WAITING = {LOOP, "poll and spin"}
"""Stages that hold a process's waiting for events."""

RULES: tuple[tuple[str, str, str], ...] = (
    ("frontend/httpd/(answers|outlet|wire)", "", "HTTP write"),
    ("frontend/httpd/exchange", "respond|start|send|end", "HTTP write"),
    ("frontend/httpd/", "", "HTTP read and parse"),
    ("frontend/http2/", "", "HTTP/2"),
    ("frontend/grpc_fast/|frontend/grpc", "", "gRPC"),
    ("frontend/kserve/(http_routes|http_paths)", "", "route"),
    ("frontend/dispatcher", "", "route"),
    ("frontend/kserve/(checks|shapes)|engines/bundle/variants", "", "checks"),
    ("frontend/kserve/", "_?(encode|write|put|pack|render|output).*", "encode"),
    ("frontend/kserve/", "", "decode"),
    ("frontend/(app|execution|deadlines|serving|inference|explanation|hooked|metrics|table)", "", "request life"),
    ("worker/channel/(placement|arena)", "", "place in arena"),
    ("worker/channel/attachment", "_?place.*", "place in arena"),
    ("worker/channel/attachment", "drain|_?reply.*|_?settle.*|_?release.*|_?answer.*", "collect replies"),
    ("worker/channel/attachment", "", "push record"),
    ("worker/channel/client", "_on_doorbell", "collect replies"),
    ("worker/channel/client", "", "push record"),
    ("worker/channel/doorbell", "", "doorbells, sleep and wake"),
    ("worker/channel/(server|table|reception)", "", "poll and spin"),
    ("worker/channel/channel", "take.*|_?read.*", "worker intake"),
    ("worker/channel/channel", "", "write replies"),
    ("worker/channel/(ring|records)", "", "rings and records"),
    ("worker/(intake|arrival)", "", "worker intake"),
    ("worker/scheduling/", "", "schedule"),
    ("worker/dispatch", "complete|_?scatter.*|_write_dynamic", "scatter"),
    ("worker/dispatch", "execute", "run"),
    ("worker/dispatch", "", "gather"),
    ("engines/(onnxruntime|array)", "", "run"),
    ("worker/device", "", "hand to the device"),
    ("worker/answers", "", "write replies"),
    ("worker/(loop|executions|registry|models|metrics|control)", "", "worker loop"),
)
"""Beginning of the file's path, the function (empty: any), the stage; the first that fits counts."""

_FRAME = re.compile(r"^(?P<function>.*) \((?P<file>[^():]+)(:\d+)?\)$")
_OURS = ("frontend/", "worker/", "engines/")
_compiled = [(re.compile(path), re.compile(function), stage) for path, function, stage in RULES]


def stage_of(frames: list[str]) -> str:
    """Return the stage of a stack, frames from the root, paths relative to the repository."""
    for frame in reversed(frames):
        found = _FRAME.match(frame)
        if found is None or not found["file"].startswith(_OURS):
            continue
        if found["file"] in ("frontend/process.py", "frontend/__main__.py"):
            return LOOP
        # Methods come with their class.
        name = found["function"].rpartition(".")[2]
        for path, function, stage in _compiled:
            if path.match(found["file"]) and (not function.pattern or function.fullmatch(name)):
                return stage
        return found["file"]
    return LOOP
