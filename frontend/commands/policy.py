"""``ringserve policy`` and ``ringserve metrics``: show and change how a running node schedules."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from engines.errors import Kind
from frontend.config import default_run_dir
from frontend.node.link import Call, Told, call_node
from frontend.node.status import table

ASK_TIMEOUT_S: Final = 8.0
"""Above what the node itself allows a worker, so that the node's reason arrives."""
EXIT_OK, EXIT_REFUSED, EXIT_NOT_ASKED = 0, 1, 2
_NUMBER: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_POLICY_HEAD: Final = (
    "MODEL", "VERSION", "WEIGHT", "QUEUED", "DISPATCHES", "REQUESTS", "ROWS", "MAX BATCH", "AXIS",
)  # fmt: skip
_METRICS_HEAD: Final = (
    "MODEL", "DISPATCHES", "REQUESTS", "ROWS", "PADDING", "COMPUTE S", "RECENT S", "WAIT P50 MS", "P99 MS", "QUEUED",
    "SHED", "BATCH SIZES",
)  # fmt: skip

Row = Sequence[str]


def run(command: str, run_dir: str | None, model: str, weight_text: str | None, *, as_json: bool) -> int:
    """Ask the node, print its answer, and return the exit status."""
    args: dict[str, Any] = {"model": model} if model else {}
    if weight_text is not None:
        if not model:
            return _say("--weight: give the model it is for: ringserve policy MODEL --weight W", EXIT_NOT_ASKED)
        weight = _weight(weight_text)
        if weight is None:
            return _say(f"--weight: expected a number above 0, got {weight_text!r}", EXIT_NOT_ASKED)
        args["weight"] = weight
    directory = os.path.abspath(os.path.expanduser(run_dir or default_run_dir(os.environ)))
    try:
        sock, line = call_node(directory, Call(ask=command, args=args), ASK_TIMEOUT_S)
        sock.close()
        told = msgspec.json.decode(line, type=Told)
    except (FileNotFoundError, ConnectionRefusedError):
        return _say(f"no node runs in {directory}; give its run directory with --run-dir", EXIT_NOT_ASKED)
    except (OSError, msgspec.MsgspecError) as error:
        return _say(f"the node in {directory} does not answer: {error}", EXIT_REFUSED)
    if told.kind != Kind.OK:
        return _say(told.text, EXIT_REFUSED)
    if as_json:
        print(json.dumps(told.value, indent=2))
    elif weight_text is not None:
        print(changed_text(told.value))
    elif command == "policy":
        print("\n\n".join(policy_text(worker) for worker in told.value))
    else:
        print("\n\n".join(metrics_text(worker, models) for worker, models in told.value.items()))
    return EXIT_OK


def policy_text(worker: dict[str, Any]) -> str:
    """Return one worker's discipline and models for people."""
    fair = worker["discipline"] == "fair"
    lines = [
        f"{worker['worker']}: discipline {worker['discipline']}, sizing {worker['sizing']}, "
        f"residency {worker['residency_mode']}" + ("" if fair else "; weights matter under fair only")
    ]
    rows: list[Row] = []
    for model in worker["models"]:
        axis = model["batch_axis"]
        rows.append((
            model["name"], model["version"], f"{model['weight']:g}", str(model["queue_depth"]),
            str(model["dispatch_count"]), str(model["requests_served"]), str(model["rows_served"]),
            str(model["effective_max_batch"]), f"{axis['input']}:{axis['axis']}" if axis else "-",
        ))  # fmt: skip
    return "\n".join(lines + (table(_POLICY_HEAD, rows) if worker["models"] else ["no models"]))


def metrics_text(worker: str, models: dict[str, dict[str, Any]]) -> str:
    """Return one worker's counters for people."""
    rows: list[Row] = []
    for name, one in models.items():
        rows.append((
            name, str(one["dispatch_count"]), str(one["requests_served"]), str(one["rows_served"]),
            str(one["padding_rows"]), f"{one['total_compute_seconds']:.3f}",
            f"{one['recent_compute_ema_seconds']:.3f}", f"{one['queue_wait_p50_seconds'] * 1e3:.2f}",
            f"{one['queue_wait_p99_seconds'] * 1e3:.2f}", str(one["queue_depth"]),
            " ".join(f"{reason}:{count}" for reason, count in sorted(one["shed"].items())) or "-",
            " ".join(f"{size}:{count}" for size, count in one["batch_sizes"].items()) or "-",
        ))  # fmt: skip
    return "\n".join([f"{worker}:", *(table(_METRICS_HEAD, rows) if models else ["no models"])])


def changed_text(change: dict[str, Any]) -> str:
    """Return what is in force now."""
    versions = f" (versions {', '.join(change['versions'])})" if change["versions"] else " (once it is loaded)"
    return f"{change['model']}: weight {change['weight']:g}{versions}"


def _weight(text: str) -> float | None:
    """Return a finite number above 0, or None; ``float`` alone would also take nan, inf and digits with underscores."""
    weight = float(text) if _NUMBER.fullmatch(text.strip()) else math.nan
    return weight if 0 < weight < math.inf else None


def _say(text: str, status: int) -> int:
    print(f"ringserve: {text}", file=sys.stderr)
    return status
