"""``ringserve batch-scheduling``: show and change when a route runs lines of batches."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from frontend.commands.gateway_client import CallFailed, GatewayClient, find_gateway
from frontend.platform.words import reason_text

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
MAX_FILE_BYTES: Final = 64 * 1024
TITLES: Final = (
    ("concurrency", "lines"),
    ("live_traffic", "live"),
    ("server_load", "load"),
    ("metrics_url", "metrics"),
    ("window", "window"),
    ("priority", "priority"),
)


def run(arguments: argparse.Namespace) -> int:
    """Run one command; return 0 if it was done, 1 if the gateway refused, 2 for wrong usage."""
    try:
        client = find_gateway(arguments.url, arguments.run_dir, os.environ)
        if arguments.scheduling_command == "list":
            return _list(client, as_json=arguments.json)
        path = f"/platform/deployments/{quote(arguments.route, safe='')}/batch-scheduling"
        if arguments.scheduling_command == "get":
            return _show(client.manage(path), as_json=arguments.json)
        document = _read(arguments.file)
        if arguments.preview:
            return print_preview(client.change("POST", f"{path}/preview", document), as_json=arguments.json)
        return _show(client.change("PUT", path, document), as_json=arguments.json)
    except CallFailed as error:
        print(f"ringserve: {error}", file=sys.stderr)
        return EXIT_FAILED
    except (OSError, ValueError) as error:
        print(f"ringserve: {error}", file=sys.stderr)
        return EXIT_USAGE


def _read(path: str) -> Any:
    """Return the JSON in a file, or in standard input for ``-``. Raises: OSError, ValueError."""
    if path == "-":
        raw = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    else:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: more than {MAX_FILE_BYTES} bytes, which are no settings")
    try:
        document = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON object of settings: {error}") from None
    # What `get --json` prints can be edited and given back whole.
    if isinstance(document, dict) and "settings" in document and "status" in document:
        return document["settings"]
    return document


def _list(client: GatewayClient, *, as_json: bool) -> int:
    found = client.manage("/platform/deployments")["data"]
    if as_json:
        return _tell(found)
    titles = ("ROUTE", "MODEL", "WAITING", "RUNNING", "STATUS", "WINDOW")
    table = [titles, *(_row(one) for one in found)]
    widths = [max(len(row[column]) for row in table) for column in range(len(titles))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return EXIT_DONE


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    status = one["status"]
    running = f"{status['running_lines']}/{status['cap']}"
    return (
        one["deployment"]["id"], one["deployment"]["model"], str(status["queued_lines"]), running, _state(status),
        one["in_words"]["window"],
    )  # fmt: skip


def _show(found: Mapping[str, Any], *, as_json: bool) -> int:
    if as_json:
        return _tell(found)
    status, words = found["status"], found["in_words"]
    print(f"{found['deployment']['id']}: {_state(status)}, model {found['deployment']['model']}")
    print(
        f"now      {status['running_lines']} of {status['cap']} lines run, {status['queued_lines']} wait in"
        f" {status['waiting_batches']} batches"
    )
    for name, title in TITLES:
        print(f"{title:8} {words[name]}")
    return EXIT_DONE


def print_preview(found: Mapping[str, Any], *, as_json: bool) -> int:
    """Print what settings would mean; return 0."""
    if as_json:
        return _tell(found)
    for name, title in TITLES:
        print(f"{title:8} {found['in_words'][name]}")
    if found["always"]:
        print("opens    at any time")
    for one in found["intervals"]:
        note = f"  ({one['note']})" if one["note"] else ""
        print(f"opens    {one['opens_local']} to {one['closes_local'] or 'further than a year'}{note}")
    if not found["always"] and not found["intervals"]:
        print("opens    never within a year")
    effects = found["effects"]
    if effects is None:
        print("batches  cannot be foreseen now; ask again")
        return EXIT_DONE
    for one in effects["data"]:
        print(f"batch    {one['batch_id']}: ends {_end(one['now'])} now, {_end(one['then'])} then")
    if effects["left_out"] or effects["personal"]:
        print(f"batches  {effects['left_out']} more, {effects['personal']} of personal workspaces")
    return EXIT_DONE


def _end(eta: Mapping[str, Any]) -> str:
    risk = ", may expire" if eta["at_risk"] else ""
    return f"{eta['eta_p50'] or 'at an unknown time'} (9 of 10: {eta['eta_p90'] or 'unknown'}{risk})"


def _state(status: Mapping[str, Any]) -> str:
    if status["paused_reason"] is not None:
        reason = str(reason_text(status["paused_reason"]))
        return f"{reason}, until {status['reopens_at']} if nobody calls" if status["reopens_at"] else reason
    return "Starting lines" if status["running_lines"] else "Idle"


def _tell(document: object) -> int:
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    return EXIT_DONE
