"""Calls of a gateway's files and batches from the command line, over HTTP with a key, streaming both ways."""

from __future__ import annotations

import http.client
import os
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from frontend.config import default_run_dir
from frontend.node.link import Call, call_node
from frontend.node.status import Answer
from frontend.openai.development import KEY_FILE

URL_VARIABLE: Final = "RINGSERVE_BASE_URL"
KEY_VARIABLE: Final = "RINGSERVE_API_KEY"
DEFAULT_URL: Final = "http://127.0.0.1:8000/v1"
MANAGEMENT: Final = "/api/v1"
"""Where the management API lies, beside ``/v1``."""
TIMEOUT_S: Final = 60.0
CREATE_TIMEOUT_S: Final = 600.0
"""A create answers when the whole file is validated."""
NODE_TIMEOUT_S: Final = 5.0
PIECE_BYTES: Final = 256 * 1024
PATIENCE_S: Final = 120.0
"""How long a gateway may be away, or ask to come back, while one call is tried again."""
MAX_PAUSE_S: Final = 5.0
Moved = Callable[[int, int], None]
"""Told (bytes so far, bytes in all; 0 if unknown)."""


class CallFailed(Exception):
    """A call that did not do what was asked; the text is for people.

    Attributes:
        faults: (line, code, message) of a refused batch input.
    """

    def __init__(self, message: str, faults: tuple[tuple[int, str, str], ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class GatewayClient:
    """One gateway and one key. Reads are tried again while the gateway is away; an upload or a create is not."""

    def __init__(
        self, base_url: str, key: str, *, clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        parts = urlsplit(base_url.rstrip("/"))
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.fragment
            or parts.username
        ):
            raise CallFailed(f"the gateway's address is {base_url!r}, expected something like {DEFAULT_URL}")
        self._parts = parts
        self._key = key
        self._clock_s = clock_s
        self._sleep = sleep

    def upload(self, path: Path, moved: Moved) -> str:
        """Return the id of a new file of purpose ``batch``. Raises: CallFailed; OSError: it cannot be read."""
        boundary = secrets.token_hex(16)
        name = path.name.encode("utf-8", "replace").decode().replace('"', "%22").replace("\r", "").replace("\n", "")
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size

            def body() -> Iterator[bytes]:
                yield head
                sent = 0
                # Not beyond the size announced, should the file grow meanwhile.
                while sent < size and (piece := file.read(min(PIECE_BYTES, size - sent))):
                    sent += len(piece)
                    moved(sent, size)
                    yield piece
                yield tail

            headers = {
                "Content-Type": f"multipart/form-data; boundary={boundary}",
                "Content-Length": str(len(head) + size + len(tail)),
            }
            return str(self._json(self._open("POST", "/files", body(), headers, TIMEOUT_S))["id"])

    def create(self, request: Mapping[str, Any], idempotency_key: str) -> dict[str, Any]:
        """Return the new batch; with its key the same call may be made again."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key}
        return self._json(self._open("POST", "/batches", msgspec.json.encode(request), headers, CREATE_TIMEOUT_S))

    def get(self, path: str) -> dict[str, Any]:
        """Return a JSON answer, trying again while the gateway is away."""
        return self._patiently(lambda: self._json(self._open("GET", path, None, {}, TIMEOUT_S)))

    def manage(self, path: str) -> dict[str, Any]:
        """Return a JSON answer of the management API, trying again while the gateway is away."""
        return self._patiently(lambda: self._json(self._open("GET", path, None, {}, TIMEOUT_S, managing=True)))

    def change(self, method: str, path: str, document: Any) -> dict[str, Any]:
        """Send a document to the management API; harmless to repeat, so it is, while the gateway is away."""
        headers = {"Content-Type": "application/json"}
        body = msgspec.json.encode(document)
        return self._patiently(lambda: self._json(self._open(method, path, body, headers, TIMEOUT_S, managing=True)))

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Return the batch after asking it to stop; harmless to repeat."""
        return self._patiently(
            lambda: self._json(self._open("POST", f"/batches/{batch_id}/cancel", b"", {}, TIMEOUT_S))
        )

    def content(self, file_id: str) -> Iterator[bytes]:
        """Yield a file's bytes. Raises: CallFailed, also when it breaks off."""
        response = self._open("GET", f"/files/{file_id}/content", None, {}, TIMEOUT_S)
        try:
            while piece := response.read(PIECE_BYTES):
                yield piece
        except (http.client.HTTPException, OSError) as error:
            raise CallFailed(f"the gateway broke off in the middle of the file: {error}") from error
        finally:
            response.close()

    def _patiently(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        until_s = self._clock_s() + PATIENCE_S
        pause_s = 0.25
        while True:
            try:
                return call()
            except _Away as error:
                if self._clock_s() + pause_s > until_s:
                    raise CallFailed(str(error)) from error
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _open(
        self, method: str, path: str, body: bytes | Iterator[bytes] | None, headers: Mapping[str, str],
        timeout_s: float, *, managing: bool = False,
    ) -> http.client.HTTPResponse:  # fmt: skip
        parts = self._parts
        base = parts.path.removesuffix("/v1") + MANAGEMENT if managing else parts.path
        assert parts.hostname is not None
        if parts.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=timeout_s, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        sent = {"Authorization": f"Bearer {self._key}", "Connection": "close", **headers}
        try:
            try:
                connection.request(method, base + path, body, sent)
            except (BrokenPipeError, ConnectionResetError):
                # Refused in the middle of an upload: the answer says why, if it can still be read.
                if connection.sock is None:
                    raise
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _Away(f"no answer from {parts.scheme}://{parts.netloc}: {error or type(error).__name__}") from error
        if response.status == 200:
            return response
        with response:
            raise _refusal(response.status, response.read(1 << 20))

    def _json(self, response: http.client.HTTPResponse) -> dict[str, Any]:
        try:
            with response:
                document = msgspec.json.decode(response.read())
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise _Away(f"the gateway's answer cannot be read: {error}") from error
        if not isinstance(document, dict):
            raise CallFailed("this is no gateway: its answer is no object")
        return document


class _Away(CallFailed):
    """The gateway cannot answer now; the same call may be made again."""


def find_gateway(url: str | None, run_dir: str | None, environ: Mapping[str, str]) -> GatewayClient:
    """Return the gateway that is meant: ``url``, ``RINGSERVE_BASE_URL``, the node in ``run_dir``, or port 8000 here.

    The key is ``RINGSERVE_API_KEY``, or the node's development key.

    Raises:
        CallFailed: there is no key.
    """
    directory = Path(os.path.expanduser(run_dir or default_run_dir(environ))).absolute()
    key = environ.get(KEY_VARIABLE) or _development_key(directory)
    return GatewayClient(url or environ.get(URL_VARIABLE) or _node_url(directory) or DEFAULT_URL, key)


def _development_key(directory: Path) -> str:
    path = directory / "gateway" / KEY_FILE
    try:
        return path.read_text().strip()
    except (OSError, UnicodeError):
        raise CallFailed(f"no key: set {KEY_VARIABLE}, or name a development node with --run-dir") from None


def _node_url(directory: Path) -> str | None:
    try:
        sock, line = call_node(str(directory), Call(ask="status"), NODE_TIMEOUT_S)
        sock.close()
        return f"http://127.0.0.1:{msgspec.json.decode(line, type=Answer).status.http_port}/v1"
    except (OSError, msgspec.MsgspecError):
        return None


def _refusal(status: int, body: bytes) -> CallFailed:
    try:
        document = msgspec.json.decode(body)
        error = document["error"]
        message = str(error["message"]) + (f" ({error['param']})" if error.get("param") else "")
        data = (document.get("errors") or {}).get("data") or []
        faults = tuple((int(one["line"]), str(one["code"]), str(one["message"])) for one in data)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
        message, faults = "the answer has another form than a gateway's", ()
    kind = _Away if status in (502, 503, 504) else CallFailed
    return kind(f"HTTP {status}: {message}", faults)
