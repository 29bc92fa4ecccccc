"""``ringserve batch``: send a file of requests to a gateway, watch it, fetch what came of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from frontend.commands.batch_outlook import page_lines, waiting_page
from frontend.commands.gateway_client import CallFailed, GatewayClient, find_gateway
from frontend.commands.progress import Progress

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
POLL_S: Final = 1.0
LIST_LIMIT: Final = 100
MAX_FIRST_LINE_BYTES: Final = 4 * 1024 * 1024
ENDED: Final = frozenset({"completed", "failed", "cancelled", "expired"})


def run(arguments: argparse.Namespace, sleep: Callable[[float], None] = time.sleep) -> int:
    """Run one ``batch`` command; return 0 if all went well, 1 if not, 2 for wrong usage."""
    try:
        client = find_gateway(arguments.url, arguments.run_dir, os.environ)
        match arguments.batch_command:
            case "submit":
                return _submit(client, arguments, sleep)
            case "list":
                return _list(client, arguments)
            case "show":
                return _show_page(client, _checked(arguments.batch), as_json=arguments.json)
            case "cancel":
                return _show(client.cancel(_checked(arguments.batch)), as_json=arguments.json)
            case _:
                return _results(client, arguments)
    except CallFailed as error:
        print(f"ringserve: {error}", file=sys.stderr)
        for line, code, message in error.faults:
            print(f"  line {line}: {code}: {message}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        # Whoever read our output has seen enough; not a failure to talk about.
        raise
    except OSError as error:
        print(f"ringserve: {error}", file=sys.stderr)
        return EXIT_USAGE


def _submit(client: GatewayClient, arguments: argparse.Namespace, sleep: Callable[[float], None]) -> int:
    path = Path(arguments.file)
    try:
        metadata = dict(_pair(text) for text in arguments.metadata)
        endpoint = arguments.endpoint or _endpoint_of(path)
    except ValueError as error:
        print(f"ringserve: {error}", file=sys.stderr)
        return EXIT_USAGE
    progress = Progress()
    with contextlib.closing(_Ending(progress)):
        input_id = client.upload(path, lambda done, total: progress.show("uploading, bytes", done, total))
        progress.show("validating", 0, 0)
        request: dict[str, Any] = {
            "input_file_id": input_id, "endpoint": endpoint, "completion_window": arguments.window,
        }  # fmt: skip
        if metadata:
            request["metadata"] = metadata
        batch = client.create(request, arguments.idempotency_key or secrets.token_hex(16))
    if not arguments.wait:
        return _show(batch, as_json=arguments.json) if arguments.json else _tell(str(batch["id"]))
    # At once: whoever interrupts the waiting must be able to find the batch again.
    print(batch["id"], file=sys.stderr)
    batch = _wait(client, batch, progress, sleep)
    _show(batch, as_json=arguments.json)
    well = batch["status"] == "completed" and batch["request_counts"]["failed"] == 0
    return EXIT_DONE if well else EXIT_FAILED


def _wait(
    client: GatewayClient, batch: dict[str, Any], progress: Progress, sleep: Callable[[float], None]
) -> dict[str, Any]:
    with contextlib.closing(_Ending(progress)):
        while True:
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            note = f"{counts['failed']} failed" if counts["failed"] else ""
            progress.show(f"{batch['status']}, lines", done, counts["total"], note)
            if batch["status"] in ENDED:
                return batch
            sleep(POLL_S)
            batch = client.get(f"/batches/{batch['id']}")


class _Ending:
    """Closes a progress however its block ends."""

    def __init__(self, progress: Progress) -> None:
        self.close = progress.end


def _list(client: GatewayClient, arguments: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    after = ""
    while len(rows) < arguments.limit:
        page = client.get(f"/batches?limit={min(LIST_LIMIT, arguments.limit - len(rows))}{after}")
        rows += page["data"]
        if not page["has_more"] or not page["data"]:
            break
        after = f"&after={page['data'][-1]['id']}"
    if arguments.json:
        return _tell(_pretty(rows))
    titles = ("BATCH", "STATUS", "DONE", "FAILED", "TOTAL", "MODEL", "CREATED")
    table = [titles, *(_row(batch) for batch in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(titles))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return EXIT_DONE


def _row(batch: dict[str, Any]) -> tuple[str, ...]:
    counts = batch["request_counts"]
    numbers = (str(counts[name]) for name in ("completed", "failed", "total"))
    return (batch["id"], batch["status"], *numbers, str(batch.get("model") or "-"), _time(batch["created_at"]))


def _show_page(client: GatewayClient, batch_id: str, *, as_json: bool) -> int:
    batch = client.get(f"/batches/{batch_id}")
    page = waiting_page(client, batch_id) if batch["status"] not in ENDED else None
    if as_json:
        # Under a name of its own: the batch itself stays what every client of the API gets.
        return _show(batch if page is None else {**batch, "scheduling": page}, as_json=True)
    _show(batch, as_json=False)
    for line in () if page is None else page_lines(page):
        print(line)
    return EXIT_DONE


def _show(batch: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        return _tell(_pretty(batch))
    counts = batch["request_counts"]
    print(f"{batch['id']}: {batch['status']}")
    print(f"lines    {counts['completed']} completed, {counts['failed']} failed, {counts['total']} in all")
    print(f"runs     {batch['endpoint']}, model {batch.get('model') or '-'}")
    print(f"created  {_time(batch['created_at'])}, window {batch['completion_window']} to {_time(batch['expires_at'])}")
    for title, name in (("input", "input_file_id"), ("output", "output_file_id"), ("errors", "error_file_id")):
        print(f"{title:8} {batch[name] or '-'}")
    for key, value in (batch.get("metadata") or {}).items():
        print(f"metadata {key}={value}")
    for fault in (batch.get("errors") or {}).get("data") or []:
        print(f"line {fault['line']}: {fault['code']}: {fault['message']}")
    return EXIT_DONE


def _results(client: GatewayClient, arguments: argparse.Namespace) -> int:
    batch = client.get(f"/batches/{_checked(arguments.batch)}")
    kind = "error" if arguments.errors else "output"
    file_id = batch[f"{kind}_file_id"]
    if file_id is None:
        state = batch["status"]
        why = "no such lines" if state in ENDED else "it is written when the batch ends"
        raise CallFailed(f"{batch['id']} is {state} and has no {kind} file: {why}")
    with _target(arguments.output) as out:
        for piece in client.content(file_id):
            out.write(piece)
    return EXIT_DONE


@contextlib.contextmanager
def _target(path: str | None) -> Iterator[BinaryIO]:
    """Give stdout, or a file that appears under its name only when it is complete."""
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    partial = Path(f"{path}.part-{os.getpid()}")
    try:
        with partial.open("xb") as out:
            yield out
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _endpoint_of(path: Path) -> str:
    """Return the endpoint that the first request of a file names: all of its lines must have the same."""
    with path.open("rb") as file:
        while line := file.readline(MAX_FIRST_LINE_BYTES):
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            if line:
                break
    try:
        url = msgspec.json.decode(line)["url"]
    except (msgspec.DecodeError, KeyError, TypeError, UnicodeError):
        url = None
    if not isinstance(url, str):
        raise ValueError(f"{path}: the first line is no request with a url; say --endpoint")
    return url


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--metadata is {text!r}, expected KEY=VALUE")
    return key, value


def _checked(batch_id: str) -> str:
    if not (batch_id.isascii() and batch_id.replace("_", "").isalnum()):
        raise CallFailed(f"{batch_id!r} is no batch id")
    return batch_id


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _pretty(document: object) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _tell(text: str) -> int:
    print(text)
    return EXIT_DONE
