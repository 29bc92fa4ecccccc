"""Which stage of a request a sampled stack belongs to: the innermost frame that lies in a file of ours decides.

Names of files and functions only; a file that is not listed shows under its own name, so nothing is hidden.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LOOP = "event loop: epoll, sockets"
"""What lies below our own frames: the loop's own work between callbacks, and the interpreter's."""

RULES: tuple[tuple[str, str, str], ...] = (
    ("frontend/(process|__main__)", "", LOOP),
    ("frontend/httpd/(answers|outlet|wire)", "", "HTTP write"),
    ("frontend/httpd/exchange", "respond|respond_ready|start|send|end", "HTTP write"),
    ("frontend/httpd/(body|exchange|hangup|heads|intake|pace|protocol|state)", "", "HTTP read and parse"),
    ("frontend/http", "", "HTTP read and parse"),
    ("frontend/http2/[a-z]+", "", "HTTP/2"),
    ("frontend/grpc_fast/[a-z_]+|frontend/grpc(_[a-z]+)?", "", "gRPC"),
    ("frontend/dispatcher|frontend/kserve/http_paths", "", "route"),
    ("frontend/kserve/http_routes", "_finish|_respond|_reply|_packed", "encode"),
    ("frontend/kserve/http_routes", "", "route"),
    ("frontend/kserve/(checks|contract|shapes)|engines/bundle/variants", "", "checks"),
    ("frontend/kserve/(json_)?repeats", "answer", "encode"),
    ("frontend/kserve/((json_)?repeats|request_ids)|frontend/attempts", "", "recognise repeats"),
    (
        "frontend/kserve/(body_codec|compression|grpc_codec|infer_templates|json_data|memory_tensors|raw_data|wire)",
        "_?(encode|output|place_output|raw_part|half_output|numbers_text|head|infer_parts|stream_infer|compress|keep).*",
        "encode",
    ),
    ("frontend/kserve/(classification|http_answers)", "", "encode"),
    (
        "frontend/kserve/(body_codec|compression|direct_body|grpc_codec|http_options|infer_templates|json_data"
        "|memory_tensors|parameters|raw_data|wire)",
        "",
        "decode",
    ),
    (
        "frontend/(app|deadlines|execution|explanation|hooked|infer_call|inference|late_call|metrics|placed_call"
        "|repeat_call|serving|table)",
        "",
        "request life",
    ),
    ("worker/channel/(placement|arena)", "", "place in arena"),
    ("worker/channel/(attachment|client)", "_?pla(ce|n)|give_back", "place in arena"),
    ("worker/channel/attachment", "drain|_take_replies|_answer|_text|fail_all", "collect replies"),
    ("worker/channel/attachment", "_announce|_ring", "doorbells, sleep and wake"),
    ("worker/channel/client", "_on_doorbell", "collect replies"),
    ("worker/channel/(attachment|client)", "", "push record"),
    ("worker/channel/doorbell", "", "doorbells, sleep and wake"),
    ("worker/channel/(server|table|reception)", "", "poll and spin"),
    ("worker/channel/channel", "take", "worker intake"),
    ("worker/channel/channel", "", "write replies"),
    ("worker/channel/(ring|records)", "", "rings and records"),
    ("worker/(intake|arrival)", "", "worker intake"),
    ("worker/scheduling/[a-z]+", "", "schedule"),
    ("worker/dispatch", "complete|_scatter_request|_write_dynamic", "scatter"),
    ("worker/dispatch", "execute", "run"),
    ("worker/gather", "scatter", "scatter"),
    ("worker/(dispatch|gather)", "", "gather"),
    ("engines/(onnxruntime|staging)|engines/(array|device|tensorrt)/.*", "", "run"),
    ("worker/device", "", "hand to the device"),
    ("worker/answers", "", "write replies"),
    ("worker/(loop|executions|registry|models|metrics|control)|worker/channel/pulse", "", "worker loop"),
    ("worker/__main__", "", "worker loop"),
)
"""The file's path without its ending, the function (empty: any), the stage; the first that fits counts."""

OFF_THE_PATH = frozenset(
    {
        # What is told of models, and regions that clients register.
        "frontend/kserve/metadata.py", "frontend/kserve/client_memory.py", "frontend/kserve/memory_store.py",
        "frontend/kserve/status.py", "frontend/kserve/proto.py", "frontend/kserve/proto_schema.py",
        # Attaching, and what is asked of a worker.
        "worker/channel/attach.py", "worker/channel/control_client.py", "worker/channel/dial.py",
        "worker/channel/frames.py", "worker/channel/layout.py", "worker/channel/messages.py",
        "worker/channel/node_link.py", "worker/channel/segment.py", "worker/channel/series.py",
        # Settings, and programs of their own.
        "worker/config.py", "worker/build.py", "worker/check.py", "worker/check_built.py",
    }
)  # fmt: skip
"""Files beside those above that no request passes, or hardly any."""

_FRAME = re.compile(r"^(?P<function>.*) \((?P<file>[^()]+)\)$")
_OURS = ("frontend/", "worker/", "engines/")
_compiled = [(re.compile(path), re.compile(function), stage) for path, function, stage in RULES]


def stage_of(frames: Sequence[str]) -> str:
    """Return the stage of a stack, frames (``function (file)``) from the root, paths relative to the repository."""
    for frame in reversed(frames):
        found = _FRAME.match(frame)
        if found is None or not found["file"].startswith(_OURS):
            continue
        # Methods come with their class, comprehensions and inner functions with what they stand in.
        names = [name for name in found["function"].split(".") if not name.startswith("<")] or [""]
        stem = found["file"].removesuffix(".py")
        for path, function, stage in _compiled:
            if path.fullmatch(stem) and (not function.pattern or function.fullmatch(names[-1])):
                return stage
        return found["file"]
    return LOOP
