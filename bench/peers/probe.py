"""One request at a time, to see whether a server is ready and whether its answers are right before it is loaded."""

from __future__ import annotations

import ctypes
import http.client
import itertools
import json
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from bench.peers import models
from bench.peers.models import Spec

if TYPE_CHECKING:
    from bench.peers.servers import Running

T = TypeVar("T")
TIMEOUT_S = 10.0
GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"
_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


class WrongAnswer(Exception):
    """A server answered something else than the model does."""


def in_namespace(pid: int | None, work: Callable[[], T]) -> T:
    """Run ``work`` in the network namespace of another process; only the thread made for it moves there."""
    if pid is None:
        return work()
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            try:
                if _libc.setns(descriptor, 0):
                    raise OSError(ctypes.get_errno(), f"no way into the network of process {pid}")
            finally:
                os.close(descriptor)
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def post(port: int, path: str, payload: models.Payload) -> tuple[int, int, bytes]:
    """Send one request; return status, length of the binary extension's header, and body.

    Raises:
        OSError: nobody answers.
    """
    headers = {"Content-Type": payload.content_type}
    if payload.header_bytes:
        headers["Inference-Header-Content-Length"] = str(payload.header_bytes)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, payload.body, headers)
        response = connection.getresponse()
        body = response.read()
        return response.status, int(response.headers.get("Inference-Header-Content-Length") or 0), body
    except http.client.HTTPException as error:
        raise OSError(f"not HTTP: {error!r}") from error
    finally:
        connection.close()


def ask(running: Running, spec: Spec, form: str) -> tuple[int, int, bytes]:
    """Send the request of a model in an HTTP format."""
    plan = running.plan
    payload = models.payload(spec, form)
    return in_namespace(running.namespace_pid, lambda: post(plan.http_port, plan.paths[form], payload))


def verify(running: Running, spec: Spec, form: str, expected: np.ndarray) -> None:
    """Compare an answer with the model's own.

    Raises:
        WrongAnswer: it differs, or is an error.
    """
    if form == "grpc":
        values = np.frombuffer(_grpc(running.plan.grpc_port, models.payload(spec, form)), np.float32)
    else:
        status, header_bytes, body = ask(running, spec, form)
        if status != 200:
            raise WrongAnswer(f"{running.peer.name} {form}: status {status}: {body[:300]!r}")
        values = models.answer_values(form, body, header_bytes)
    compare(f"{running.peer.name} {form}", values, expected)


def compare(what: str, values: np.ndarray, expected: np.ndarray) -> None:
    """Raise WrongAnswer unless the values are the expected ones up to float32's accuracy."""
    if values.shape != expected.shape:
        raise WrongAnswer(f"{what}: {values.size} values, expected {expected.size}")
    if not np.allclose(values, expected, rtol=1e-3, atol=1e-4):
        raise WrongAnswer(f"{what}: values differ by up to {np.abs(values - expected).max():g}")


class SharedRegion:
    """A region of system shared memory that holds the request's tensor and takes the answer's; a context manager."""

    def __init__(self, running: Running, spec: Spec) -> None:
        self._running = running
        self._spec = spec
        # A new name each time: Triton may still hold the last one for a request that is just ending.
        self.name = f"ringserve-bench-{os.getpid()}-{next(_numbers)}"

    def __enter__(self) -> SharedRegion:
        row = models.row_of(self._spec)
        with open(f"/dev/shm/{self.name}", "wb") as file:
            file.write(row.tobytes())
            file.truncate(self._spec.row_bytes)
        document = {"key": f"/{self.name}", "offset": 0, "byte_size": self._spec.row_bytes}
        try:
            self._memory("register", document)
        except BaseException:
            os.unlink(f"/dev/shm/{self.name}")
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._memory("unregister", {})
        finally:
            os.unlink(f"/dev/shm/{self.name}")

    @property
    def payload(self) -> models.Payload:
        return models.shared_memory_payload(self._spec, self.name)

    def verify(self, expected: np.ndarray) -> None:
        """Have the server compute into the region once; raise WrongAnswer unless the result is right."""
        plan = self._running.plan
        status, _, body = post(plan.http_port, plan.paths["shm"], self.payload)
        if status != 200:
            raise WrongAnswer(f"{self._running.peer.name} shm: status {status}: {body[:300]!r}")
        whole = np.fromfile(f"/dev/shm/{self.name}", np.float32)
        compare(f"{self._running.peer.name} shm", whole[-len(expected) :], expected)

    def _memory(self, verb: str, document: dict[str, object]) -> None:
        path = f"/v2/systemsharedmemory/region/{self.name}/{verb}"
        body = json.dumps(document).encode()
        status, _, answer = post(self._running.plan.http_port, path, models.Payload("json", body, "application/json"))
        if status != 200 and verb == "register":
            raise WrongAnswer(f"{self._running.peer.name} offers no system shared memory: {status} {answer[:200]!r}")


def _grpc(port: int, payload: models.Payload) -> bytes:
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.max_receive_message_length", -1)]) as channel:
        try:
            answer = channel.unary_unary(GRPC_PATH)(payload.body[5:], timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise WrongAnswer(f"gRPC: {error}") from error
    return models.answer_values("grpc", models.grpc_frame(answer)).tobytes()
