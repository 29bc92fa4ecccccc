"""``ringserve status`` and ``ringserve models``: ask a running node over its socket."""

from __future__ import annotations

import os
import sys

import msgspec

from frontend.config import default_run_dir
from frontend.node.link import Call, call_node
from frontend.node.status import Answer, models_text, status_text

ASK_TIMEOUT_S = 5.0
EXIT_READY, EXIT_NOT_READY, EXIT_NO_NODE = 0, 1, 2


def show(command: str, run_dir: str | None, *, as_json: bool) -> int:
    """Print what the node says; return 0 if it is ready, 1 if it runs but is not, 2 if there is none."""
    directory = os.path.abspath(os.path.expanduser(run_dir or default_run_dir(os.environ)))
    try:
        sock, line = call_node(directory, Call(ask="status"), ASK_TIMEOUT_S)
        sock.close()
        answer = msgspec.json.decode(line, type=Answer)
    except (FileNotFoundError, ConnectionRefusedError):
        print(f"ringserve: no node runs in {directory}; give its run directory with --run-dir", file=sys.stderr)
        return EXIT_NO_NODE
    except (OSError, msgspec.MsgspecError) as error:
        print(f"ringserve: the node in {directory} does not answer: {error}", file=sys.stderr)
        return EXIT_NO_NODE
    status = answer.status
    if as_json:
        shown = status if command == "status" else status.models
        print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
    else:
        print(status_text(answer) if command == "status" else models_text(status.models))
    return EXIT_READY if status.state == "ready" else EXIT_NOT_READY
